#!/usr/bin/env bash
# Style, types, imports and tests, as a change must pass them. Needs: pip install -c constraints.txt -e '.[test]'
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD

ruff check .
ruff format --check .

# Types and imports are checked on the package as it installs, where adapters/ and recipes/ are inside workbench.
installed=$(mktemp -d)
trap 'rm -rf "$installed"' EXIT
python -m pip install --quiet --no-deps --target "$installed" .
MYPYPATH=$installed mypy -p workbench
MYPYPATH=$installed mypy scripts
(cd "$installed" && PYTHONPATH=$installed lint-imports --no-cache --config "$checkout/pyproject.toml")

pytest "$@"
