"""What `edgeformer profile` and `edgeformer calibrate` refuse before they measure anything."""

import json

import pytest

from tests.runtimes.tiny_bundle import write_bundle


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("profile", "--choose --min-accuracy 0.9", "No such option"),
        ("profile", "--choose --min-score 91", "0.91 is 91%"),
        ("profile", "--min-score 0.9", "--min-score: is an option of --choose; add --choose"),
        ("profile", "--minimize size", "--minimize: is an option of --choose; add --choose"),
        ("profile", "--choose --minimize price", "price"),
        ("profile", "--search", "give --choose instead"),
        ("profile", "--bundle another-run", "--bundle: is for a report"),
        ("profile", "--calibrate", "No such option"),
        ("profile", "--max-energy 10", "--max-energy"),
        ("profile", "--max-energy 10MiB", "uJ, mJ, J"),
        ("profile", "--threads 1,two", "--threads 1,16"),
        ("profile", "--threads 0", "at least 1"),
        ("calibrate", "--threads 1,2", "one number of threads"),
        ("calibrate", "--validate-only --threads 1", "uses the threads of the calibration"),
        ("calibrate", "--validate-only", "has no calibration; run edgeformer calibrate"),
        ("calibrate", "--also another-run --validate-only", "--also: adds runs to a calibration"),
        ("calibrate", "--also another-run", "another-run"),
        ("calibrate", "--choose", "No such option"),
    ],
)
def test_options_that_make_no_sense(tmp_path, edgeformer, command, options, expected):
    folder = write_bundle(tmp_path / "bundle")
    files = sorted(folder.rglob("*"))
    printed = edgeformer(command, str(folder), "--device", "host", "--json", *options.split(), code=2)
    assert expected in json.loads(printed.splitlines()[0])["error"] and sorted(folder.rglob("*")) == files
