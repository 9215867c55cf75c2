#!/usr/bin/env bash
# Style, types, imports and tests, as a change must pass them. Needs: pip install -c constraints.txt -e '.[test]'
set -euo pipefail
cd "$(dirname "$0")/.."

ruff check .
ruff format --check .

mypy -p workbench
mypy scripts
lint-imports --no-cache

pytest "$@"
