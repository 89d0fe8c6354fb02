# To be sourced on a machine with a card and without a network, from the root of the checkout:  . benchmarks/gpu/unpack.sh
# Wheels are archives: unpacked into one folder they can be imported, and nothing is installed. Then:  python3 -m benchmarks.gpu
BROUGHT="$PWD/benchmarks/gpu/brought"
PYTHON="${PYTHON:-python3}"
if [ ! -f "$BROUGHT/manifest.json" ]; then
  echo "no $BROUGHT/manifest.json: run python -m benchmarks.gpu.pack where there is a network, in the root of the checkout" >&2
  return 2 2>/dev/null || exit 2
fi
# They come before what is installed here, so only what is missing was packed: no other torch, no other numpy.
for wheel in "$BROUGHT"/wheels/*.whl; do
  [ -f "$wheel" ] && "$PYTHON" -m zipfile -e "$wheel" "$BROUGHT/packages"
done
for packed in "$BROUGHT"/data/models/*/*.xz; do
  [ -f "$packed" ] && [ ! -f "${packed%.xz}" ] && "$PYTHON" -c "import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], 'wb'))" "$packed" "${packed%.xz}"
done
export PYTHONPATH="$PWD:$BROUGHT/packages${PYTHONPATH:+:$PYTHONPATH}"
export EDGEFORMER_TEST_DATA="$BROUGHT/data"
# Nothing may wait for a network that is not there.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PIP_NO_INDEX=1
"$PYTHON" -c "import edgeformer, pydantic, torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda, 'card:', torch.cuda.get_device_name() if torch.cuda.is_available() else 'none')"
