#!/usr/bin/env bash
# A day on a GPU in one command: the tests of an accelerator, then the benchmark against TRL, Unsloth and a raw loop.
#   scripts/gpu/prove.sh [--rehearse [--whole]] [tests [FILE ...] | bench [CASE ...]]
# Nothing is fetched: what this Python lacks comes from gpu-wheels (scripts/gpu/wheels.sh). Results go to $OUT, or to
# gpu-results, as they come. A call ends within SECONDS_LEFT (540 s). See scripts/gpu/README.md.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3} wheels=${WHEELS:-$checkout/gpu-wheels} site=${SITE:-/tmp/workbench-site}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
export WORKBENCH_CACHE=${WORKBENCH_CACHE:-/tmp/workbench-cache}
# A folder in which Python stands offers its own `workbench`, without adapters and recipes.
export PYTHONSAFEPATH=1

if ! (cd / && "$python" -c 'import workbench.recipes, pydantic') 2> /dev/null; then
    mkdir -p "$site"
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
    if [ -d "$wheels" ]; then
        "$python" "$checkout/scripts/gpu/missing.py" "$wheels" > "$site/missing.txt"
        [ ! -s "$site/missing.txt" ] ||
            "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
                --requirement "$site/missing.txt"
    fi
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --no-compile --upgrade --target "$site" \
        "$checkout"
fi
exec "$python" "$checkout/scripts/gpu/prove.py" --seconds "$((${SECONDS_LEFT:-540} - SECONDS))" "$@"
