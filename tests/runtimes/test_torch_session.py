from __future__ import annotations

import numpy as np
import pytest

from edgeformer.artifacts.errors import EdgeformerError, InputError

torch = pytest.importorskip("torch")


def make_session():  # type: ignore[no-untyped-def]
    from edgeformer.runtimes.torch.session import TorchSession

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            self.dropout = torch.nn.Dropout(0.9)

        def forward(self, input_ids, attention_mask):  # type: ignore[no-untyped-def]
            assert torch.is_inference_mode_enabled()
            kept = (input_ids * attention_mask).sum(-1, keepdim=True)
            return self.dropout(kept.to(self.scale.dtype) * self.scale)

    return TorchSession(Counting().train())


def test_runs_in_evaluation_and_inference_mode_and_answers_in_float32() -> None:
    ids = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int64)
    with make_session() as session:
        outputs = session.run({"input_ids": ids, "attention_mask": np.array([[1, 1, 0], [1, 1, 1]], np.int64)})
        assert session.provider == "torch-cpu"
    assert outputs["logits"].dtype == np.float32
    np.testing.assert_array_equal(outputs["logits"], [[3, 3], [15, 15]])


def test_unusable_inputs_and_closed_sessions_are_explained() -> None:
    session = make_session()
    ids = np.ones((1, 3), np.int64)
    with pytest.raises(InputError, match="'attention_mask' is missing"):
        session.run({"input_ids": ids})
    with pytest.raises(InputError, match=r"but is float64\[1, 3\]"):
        session.run({"input_ids": ids.astype(float), "attention_mask": ids})
    session.close()
    with pytest.raises(EdgeformerError, match="closed"):
        session.run({"input_ids": ids, "attention_mask": ids})


def test_a_run_is_computed_on_a_card_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeformer.runtimes.torch import RUNTIME

    for has_card, kinds in ((True, ("cuda", "cpu", "cuda")), (False, ("cpu", "cpu"))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_card=has_card: has_card)
        providers = (None, "torch-cpu", "torch-cuda")[: len(kinds)]
        assert tuple(map(RUNTIME.device, providers)) == kinds
    for provider, message in (("torch-cuda", "torch finds no CUDA card"), ("torch", "torch-cpu or")):
        with pytest.raises(InputError, match=f"--runtime {provider}: .*{message}"):
            RUNTIME.device(provider)
