"""Questions that only an import can answer, asked in child processes: an import may crash, hang or print.

``import torch_tensorrt`` without its libraries raises a bare Exception and prints to stdout; ``import
tensorrt`` may abort the process; torch costs 200 MB. None of that may happen in the process that asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MARK = "edgeformer-probe:"

# Each prints what it found through `say`; an exception becomes the error text.
SCRIPTS: Mapping[str, str] = {
    "onnxruntime": """
import onnxruntime
say(version=onnxruntime.__version__, providers=onnxruntime.get_available_providers())
""",
    "torch": """
import torch
cuda = torch.cuda.is_available()
say(version=torch.__version__, built_for=torch.version.cuda or "cpu", cuda=cuda,
    devices=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [])
""",
    "tensorrt": """
import tensorrt
say(version=tensorrt.__version__)
logger = tensorrt.Logger(tensorrt.Logger.INTERNAL_ERROR)
say(builder=tensorrt.Builder(logger) is not None)
say(runtime=tensorrt.Runtime(logger) is not None)
""",
    "tensorrt_rtx": """
import tensorrt_rtx
say(version=tensorrt_rtx.__version__)
known = [name[2:] for name in dir(tensorrt_rtx.ComputeCapability) if name.startswith("SM")]
say(capabilities=[f"{name[:-1]}.{name[-1]}" for name in sorted(known, key=int)])
logger = tensorrt_rtx.Logger(tensorrt_rtx.Logger.INTERNAL_ERROR)
say(builder=tensorrt_rtx.Builder(logger) is not None)
say(runtime=tensorrt_rtx.Runtime(logger) is not None)
""",
    "torch_tensorrt": "import torch_tensorrt\nsay(version=torch_tensorrt.__version__, builder=True)\n",
    "onnxruntime_ep_nv_tensorrt_rtx": """
import onnxruntime, onnxruntime_ep_nv_tensorrt_rtx as plugin
say(version=plugin.__version__)
onnxruntime.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
say(devices=len([one for one in onnxruntime.get_ep_devices() if one.ep_name == plugin.get_ep_name()]))
""",
    "flash_attn": "import flash_attn\nsay(version=flash_attn.__version__)\n",
    "openvino": """
import openvino
say(version=openvino.__version__, devices=openvino.Core().available_devices)
""",
}

_PRELUDE = """
import json, sys, traceback
found = {}
def say(**facts): found.update(facts)
try:
    exec(compile(sys.argv[1], "<probe>", "exec"))
except BaseException as error:
    text = (str(error).strip().splitlines() or [""])[0]
    found["error"] = f"{type(error).__name__}: {text}"[:300]
"""
_PROGRAM = f"{_PRELUDE}\nprint(); print({_MARK!r} + json.dumps(found), flush=True)\n"


@dataclass(frozen=True)
class Answer:
    """What a probe found before it ended, and why it ended early (None: it did not)."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def ask_all(modules: list[str], timeout_s: float) -> dict[str, Answer]:
    """Run the probes of ``modules`` side by side; none may take longer than ``timeout_s`` from now."""
    started = {module: _start(module) for module in modules}
    deadline = time.monotonic() + timeout_s
    return {
        module: _collect(process, max(0.1, deadline - time.monotonic()), timeout_s)
        for module, process in started.items()
    }


def _start(module: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, SCRIPTS[module]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
    )


def _collect(process: subprocess.Popen[str], timeout_s: float, limit_s: float) -> Answer:
    try:
        stdout, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Answer(error=f"the import did not finish within {limit_s:.0f} s")
    lines = [line for line in stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        return Answer(error=f"the import ended the process ({exit_text(process.returncode)})")
    facts: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    return Answer(facts, facts.pop("error", None))


def exit_text(code: int) -> str:
    """A process's end for a person: ``exit code 3``, ``killed by signal 11 (SIGSEGV)``."""
    if code >= 0:
        return f"exit code {code}"
    import signal

    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"
