#!/usr/bin/env bash
# Trains the demo's EAGLE-3 head for more of its own states, as drafting ahead wants it:
# deeper.sh TOKENS MT_BENCH OUT SECONDS PROMPTS HEAD
set -euo pipefail
tokens=$1 questions=$2 out=$3 seconds=$4 prompts=$5 head=$6
target=shared/demo/target
python=${PYTHON:-python3}
trainer="$python -m services.draft.training"

mkdir -p "$out"
jobs=()
for part in 0 1 2 3 4 5 6 7; do
  $python -m shared.demo.heads.prompts --tokens "$tokens" --tokenizer $target/tokenizer.json \
    --count $((prompts / 8)) --seed $((20 + part)) --out "$out/prompts.$part.npz" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
$trainer generate --target $target --prompts "$out"/prompts.?.npz --out "$out/own.npz" \
  --max-new-tokens 160 --batch-size 4096 --temperatures 0 1 0 0.7 --seed 20

$trainer train --target $target --algorithm EAGLE3 --init "$head" --out "$out/further" \
  --data "$out/own.npz=1" --data "$tokens=1" --seed 20 --seconds "$seconds" --steps 1000000 \
  --batch-size 32 --window 512 --optimiser muon --compile --rate 1.5e-3 --hard 0.2 \
  --unroll 11 --decay 0.9 --log-every 20

$trainer average --head "$head=1" "$out/further=3" --out "$out/eagle3"
for steps in 5 11; do
  $trainer evaluate --target $target --dtype float32 --prompts "$questions" --steps $steps \
    --head "$head" "$out/further" "$out/eagle3" --batch-size 80 --out "$out/evaluation.$steps.json"
done
