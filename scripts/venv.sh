# Sourced by demo and test, from the repository's root. `prepare_python [EXTRA]` sets PYTHON to an interpreter with this
# project and its dependencies: the one that MKB_PYTHON names, or a virtual environment in .venv-demo, which is made if
# it is missing or made for other requirements.

VENV=.venv-demo

say() { printf '%s\n' "$*" >&2; }

die() { say "error: $*"; exit 2; }

base_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "Python 3.11 or later is needed, and none was found as python3, python3.13, python3.12 or python3.11"
}

has_gpu() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

# A CUDA build of torch is several gigabytes, which a machine without a GPU has no use for: take the package index's
# own CPU build if pip would pick one, else let uv find it.
install_cpu_torch() {
  local torch version
  torch=$("$PYTHON" -c 'import tomllib
for line in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    if line.startswith("torch>"): print(line)')
  version=$("$PYTHON" -m pip install -qq --dry-run --no-deps --report - "$torch" |
    "$PYTHON" -c 'import json, sys; print(*(i["metadata"]["version"] for i in json.load(sys.stdin)["install"]))')
  case $version in
    "") ;; # installed already
    *+cpu) "$PYTHON" -m pip install -qq "$torch" ;;
    *)
      "$PYTHON" -m pip install -qq uv
      "$PYTHON" -m uv pip install -qq --python "$PYTHON" --torch-backend=cpu "$torch"
      ;;
  esac
}

prepare_python() {
  local extra=${1:-} base stamp wanted
  if [ -n "${MKB_PYTHON:-}" ]; then
    PYTHON=$MKB_PYTHON
    "$PYTHON" -c 'import torch, cutlass, tvm, gymnasium' || die "MKB_PYTHON=$MKB_PYTHON lacks a dependency, see above"
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    compgen -G 'mkb_env/recorder/driver/*.so*' >/dev/null || "$PYTHON" setup.py --quiet build_ext --inplace
    return
  fi
  base=$(base_python)
  PYTHON=$PWD/$VENV/bin/python
  stamp=$VENV/made-for${extra:+-$extra}
  wanted=$({ "$base" -VV; cat pyproject.toml setup.py mkb_env/recorder/driver/*.{c,h,map}; has_gpu && echo gpu; pwd; } |
    "$base" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  command -v "${CC:-cc}" >/dev/null || die "a C compiler is needed (cc, or what CC names)"
  say "Installing into $VENV (once; some minutes) ..."
  [ -x "$PYTHON" ] || "$base" -m venv "$VENV"
  "$PYTHON" -m pip install -qq --upgrade pip # older ones download a wheel to answer a dry run
  has_gpu || install_cpu_torch
  "$PYTHON" -m pip install -qq -e ".${extra:+[$extra]}"
  printf '%s\n' "$wanted" | tee "$stamp" >"$VENV/made-for" # with an extra, it serves without as well
}
