#!/usr/bin/env bash
# Runs every make target other than the tests in its shortest form.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

run() {
    local started=$SECONDS
    echo "smoke: make $*"
    if ! make --no-print-directory "$@" >"$out/log" 2>&1; then
        tail -n 40 "$out/log"
        echo "smoke: make $1 failed"
        exit 1
    fi
    echo "smoke: make $1 took $((SECONDS - started)) s"
}

run help
run lint
run facts
run sbom
run chart
run docs
run parity ATTUNE_PARITY_FLAGS="--repeats 1"
run bench-trainer ATTUNE_BENCH_FLAGS="--models demo --threads 2 --rounds 1 --demo-prompts 2"
run bench-learning ATTUNE_BENCH_FLAGS="--runs GRPO --seeds 0 --updates 1 --out $out/learning.jsonl"
run bench-staleness ATTUNE_BENCH_FLAGS="--losses decoupled --lags 0 --seeds 0 --updates 1 --out $out/staleness.jsonl"
run bench-rates ATTUNE_BENCH_FLAGS="--algorithms KTO --rates 1e-3 --seeds 0 --updates 1 --out $out/rates.jsonl"
run bench-late-votes ATTUNE_BENCH_FLAGS="--strategies mixed --delays late --seeds 0 --minutes 6 --out $out/late_votes.jsonl"
run bench-sparse-votes ATTUNE_BENCH_FLAGS="--recipes model-one-pass --judged 0.5 --seeds 0 --max-votes 100 --out $out/sparse_votes.jsonl"
run bench-growth ATTUNE_BENCH_FLAGS="--turns 1000 --rounds 1"
run bench-scaling ATTUNE_BENCH_FLAGS="--turns 1000 --rounds 1"
run bench-poisoning ATTUNE_BENCH_FLAGS="--attacks nobody --protections on --updates 1 --evaluation-users 4 --out $out/poisoning.jsonl"
run bench-reward-model ATTUNE_BENCH_FLAGS="--labels 60 --train-prompts 150 --evaluation-prompts 48 --out $out/reward-model"
run bench-canary ATTUNE_BENCH_FLAGS="--cases better --seeds 0 --max-updates 1 --patience 15 --people 4 --out $out/canary.jsonl"
run model ATTUNE_MODEL_FLAGS="--dialogues 200 --no-measure --out $out/model"
run demo ATTUNE_DEMO_FLAGS="--once --updates 1 --min-approval 0"
run bench-overlap ATTUNE_BENCH_FLAGS="--rows 1 --updates 3 --runs 1 --out $out/overlap.jsonl"
run bench-votes ATTUNE_BENCH_FLAGS="--set ATTUNE_TRAINER__BATCH_SIZE=16 --max-votes 40 --max-minutes 2 --out $out/votes.jsonl"
run bench-policies ATTUNE_BENCH_FLAGS="--updates 1 --replies 5 --out $out/policies.jsonl"
run bench-swap ATTUNE_BENCH_FLAGS="--publications 2 --moves 2 --peer 1 --people 1 --quiet 0"
run bench-swap-full ATTUNE_BENCH_FLAGS="--publications 1 --moves 1 --peer 0 --people 1 --quiet 0"
run faults ATTUNE_FAULTS_FLAGS="--parts kills --where embedded --kinds worker --kills 1 --seconds 20 --results $out/faults.jsonl"
run fuzz ATTUNE_FUZZ_FLAGS="--cases 500 --parts bodies --out $out/fuzz.jsonl"
echo "smoke: all targets ended well"
