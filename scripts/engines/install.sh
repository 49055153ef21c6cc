#!/usr/bin/env bash
# Make an environment with vLLM in the folder that is given, unless it is there; prints its interpreter.
set -euo pipefail
folder=$1
if [[ ! -e $folder/done ]]; then
  python3 -m venv --clear "$folder" >&2
  "$folder/bin/pip" install -q --disable-pip-version-check -r "$(dirname "$0")/vllm.txt" >&2
  # Their builds do not fit a CPU's torch, and vLLM imports them where they are.
  "$folder/bin/pip" uninstall -q -y torchvision torchaudio torchcodec >&2
  touch "$folder/done"
fi
echo "$(cd "$folder" && pwd)/bin/python"
