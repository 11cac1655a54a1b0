#!/usr/bin/env bash
# What a running server answers; start one with `make serve`.
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

curl -sS "$url/health"; echo
curl -sS "$url/v1/models"; echo
curl -sSN "$url/v1/completions" -H 'Content-Type: application/json' -d '{
  "model": "tiny-moe", "prompt": "Emma could not", "max_tokens": 40, "seed": 1, "stream": true}'
