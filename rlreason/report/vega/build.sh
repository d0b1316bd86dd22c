#!/bin/sh
# Builds vega.js, the part of Vega that a report's page needs, with npm, and says what it is made of.
# The version of vega in package.json is that of vl-convert (`vl_convert.get_vega_version()`): what compiles the
# pictures and what draws them go together. A new one: change it there, delete package-lock.json and run this again.
set -eu
runtime=$(cd "$(dirname "$0")" && pwd)
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
cp "$runtime/package.json" "$runtime/entry.js" "$runtime/describe.mjs" "$built"
cd "$built"
if [ -f "$runtime/package-lock.json" ]; then
  cp "$runtime/package-lock.json" .
  npm ci --no-audit --no-fund
else
  npm install --no-audit --no-fund
fi
npx esbuild entry.js --bundle --minify --format=iife --target=es2022 --charset=utf8 --legal-comments=none \
  --metafile=meta.json --outfile=vega.js
# The file stands inside a <script> element: nothing in it may end one, or begin a comment there.
if grep -qiE '</script|<!--' vega.js; then
  echo "vega.js holds text that would end its <script> element" >&2
  exit 1
fi
node describe.mjs "$built" vega.js "$runtime"
cp vega.js package-lock.json "$runtime"
