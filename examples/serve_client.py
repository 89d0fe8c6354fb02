"""Ask a running `edgeformer serve` for labels. Needs nothing but Python."""

import argparse
import json
import urllib.request

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("url", help="for example http://127.0.0.1:8000")
parser.add_argument("texts", nargs="+")
arguments = parser.parse_args()

request = urllib.request.Request(
    f"{arguments.url}/predict",
    data=json.dumps({"texts": arguments.texts}).encode(),
    headers={"content-type": "application/json"},
)
with urllib.request.urlopen(request, timeout=30) as response:
    for prediction in json.load(response)["predictions"]:
        print(prediction["label"], round(prediction["probability"], 3), prediction["text"])
