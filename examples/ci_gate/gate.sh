#!/usr/bin/env bash
# Fail when the candidate bundle is slower, larger or worse than the baseline: gate.sh CANDIDATE BASELINE [HELD_OUT.csv]
set -uo pipefail
candidate=$1 baseline=$2 held_out=${3:-}
edgeformer gate "$candidate" --against "$baseline" --device host --batch 1 --seq 64 --max-slowdown 5% \
  ${held_out:+--eval-data "$held_out"} --junit gate.xml --summary "${GITHUB_STEP_SUMMARY:-gate.md}"
code=$?
if [ "$code" -eq 4 ]; then # undecided: the machine is too noisy. Remove these lines to block the change instead.
  echo "::warning::the gate is undecided; the summary says why"
  code=0
fi
exit "$code"
