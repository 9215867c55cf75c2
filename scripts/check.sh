#!/usr/bin/env bash
# Style, types and tests, as a change must pass them. Needs: pip install -c constraints.txt -e '.[test]'
set -euo pipefail
cd "$(dirname "$0")/.."

ruff check .
ruff format --check .

# Types are checked on the package as it installs, where adapters/ and recipes/ are inside workbench.
installed=$(mktemp -d)
trap 'rm -rf "$installed"' EXIT
python -m pip install --quiet --no-deps --target "$installed" .
MYPYPATH=$installed mypy -p workbench
MYPYPATH=$installed mypy scripts

pytest "$@"
