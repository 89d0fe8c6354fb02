"""Stands in for ``ssh`` and its server where OpenSSH's server is not installed: commands run here, in another home.

The first argument is a file with a JSON line for each machine, which :func:`tests.machines.sshd.start_sshd` writes.
"""

import json
import os
import shlex
import sys
from pathlib import Path


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def main() -> None:
    arguments = sys.argv[2:]
    if "-O" in arguments:  # there is no shared login
        return
    host, command = arguments[arguments.index("--") + 1 :]
    machines = {machine["name"]: machine for machine in map(json.loads, Path(sys.argv[1]).read_text().splitlines())}
    if host not in machines or not is_running(machines[host]["pid"]):
        print(f"ssh: connect to host {host} port 22: Connection refused", file=sys.stderr)
        sys.exit(255)
    machine = machines[host]
    with Path(machine["log"]).open("a") as log:
        log.write("login\n")
    os.chdir(machine["home"])
    variables = (word.partition("=") for word in shlex.split(machine["environment"]))
    environment = {name: value for name, _, value in variables}
    program = [*machine["launcher"], "/bin/sh", "-c", command]
    os.execvpe(program[0], program, {"PATH": os.environ["PATH"], "HOME": machine["home"], **environment})


if __name__ == "__main__":
    main()
