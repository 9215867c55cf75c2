#!/usr/bin/env bash
# The documentation as a site of plain files that ask nothing of the network: scripts/docs.sh [OUT]   (default site/)
# Needs: pip install -c constraints.txt -e '.[docs]'. Look at it with: python -m http.server --directory site
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-site}")
if [ -e "$out" ] && [ ! -f "$out/sitemap.xml" ] && [ -n "$(ls -A "$out")" ]; then
    echo "$out holds other files. Name a folder that is new, empty, or a site made before." >&2
    exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export DOCS=$work/docs SOURCE=$work/source
export NO_MKDOCS_2_WARNING=1    # a banner of mkdocs-material about its successor

python "$here/docs/assemble.py" "$DOCS" "$SOURCE"
python -m mkdocs build --strict --config-file "$here/docs/mkdocs.yml" --site-dir "$out"
echo "$out/index.html"
