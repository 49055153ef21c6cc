#!/usr/bin/env bash
# Make an environment in the folder that is given, unless it is there; prints its interpreter. The folder's
# name says what is in it: vllm, llama_cpp, authors or transformers, as <program>.txt pins it, or another
# version of the list's first package, as in vllm-0.31.0.
set -euo pipefail
folder=${1:-}
name=$(basename -- "$folder")
program=${name%%-*} version=${name#*-}
if [[ -z $program || ! -e $(dirname "$0")/$program.txt ]]; then
  echo "usage: install.sh FOLDER, whose name is vllm, llama_cpp, authors or transformers, or vllm-<version>" >&2
  exit 2
fi
if [[ $version == "$program" ]]; then version=; fi
lists="$(dirname "$0")/$program"
install=("$folder/bin/pip" install -q --no-compile --disable-pip-version-check)
if [[ ! -e $folder/done ]]; then
  python3 -m venv --clear "$folder" >&2
  sed "${version:+0,/==.*/s//==$version/}" "$lists.txt" > "$folder/wanted.txt"
  "${install[@]}" -r "$folder/wanted.txt" >&2
  if [[ -e $lists.alone.txt ]]; then "${install[@]}" --no-deps -r "$lists.alone.txt" >&2; fi
  # Their builds do not fit a CPU's torch, and vLLM imports them where they are.
  "$folder/bin/pip" uninstall -q -y torchvision torchaudio torchcodec >&2
  touch "$folder/done"
fi
echo "$(cd "$folder" && pwd)/bin/python"
