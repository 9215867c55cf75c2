#!/usr/bin/env bash
# Fetch the wheels of scripts/gpu/wheels.txt into one folder, for a GPU machine that reaches no network.
#   scripts/gpu/wheels.sh [FOLDER] [PYTHON] [CUDA]     # by default gpu-wheels 3.12 cuda130, on x86-64 Linux
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-gpu-wheels} version=${2:-3.12} cuda=${3:-cuda130}
most=$((60 * 1000 * 1000)) sources='^deepspeed=='
mkdir -p "$folder"

pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
grep -vE '^(#|$)' scripts/gpu/wheels.txt | while read -r name; do
    case $name in
        *==*) echo "$name" ;;
        *) grep -iE "^${name//[-_]/[-_]}==" constraints.txt || { echo "$name has no pin in constraints.txt" >&2; exit 1; } ;;
    esac
done > "$pins"

python -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
    --dest "$folder" --requirement <(grep -vE "$sources" "$pins")
# DeepSpeed comes as source alone, which is all Python: it compiles nothing before a run asks for it.
grep -E "$sources" "$pins" | while read -r pin; do
    DS_BUILD_OPS=0 python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" "$pin"
done

python scripts/gpu/thin.py "$(ls "$folder"/bitsandbytes-*.whl)" "$cuda"

size=$(du -cb "$folder"/*.whl | tail -n 1 | cut -f 1)
echo "$folder: $(ls "$folder"/*.whl | wc -l) wheels, $((size / 1000000)) MB"
[ "$size" -le "$most" ] || { echo "more than $((most / 1000000)) MB: take lines out of scripts/gpu/wheels.txt" >&2; exit 1; }
