#!/usr/bin/env bash
# Make an environment in the folder that is given, unless it is there; prints its interpreter. The folder's
# name says what is in it: vllm, authors or llama_cpp.
set -euo pipefail
folder=$1
lists="$(dirname "$0")/$(basename "$folder")"
install=("$folder/bin/pip" install -q --no-compile --disable-pip-version-check)
if [[ ! -e $folder/done ]]; then
  python3 -m venv --clear "$folder" >&2
  "${install[@]}" -r "$lists.txt" >&2
  if [[ -e $lists.alone.txt ]]; then "${install[@]}" --no-deps -r "$lists.alone.txt" >&2; fi
  # Their builds do not fit a CPU's torch, and vLLM imports them where they are.
  "$folder/bin/pip" uninstall -q -y torchvision torchaudio torchcodec >&2
  touch "$folder/done"
fi
echo "$(cd "$folder" && pwd)/bin/python"
