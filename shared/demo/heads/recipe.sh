#!/usr/bin/env bash
# Trains the demo heads on one GPU and measures them:
# recipe.sh TOKENS MT_BENCH OUT SECONDS PROMPTS [HEADS], where a second run goes on from HEADS
set -euo pipefail
tokens=$1 questions=$2 out=$3 seconds=$4 prompts=$5 heads=${6:-}
target=shared/demo/target
python=${PYTHON:-python3}
trainer="$python -m services.draft.training"
# The second run sees other answers, and as much of the corpus as of them.
if [[ $heads ]]; then seed=10 share=1 rate=2e-3; else seed=0 share=3 rate=3e-3; fi

mkdir -p "$out"
jobs=()
for part in 0 1 2 3; do
  $python -m shared.demo.heads.prompts --tokens "$tokens" --tokenizer $target/tokenizer.json \
    --count $((prompts / 4)) --seed $((seed + part)) --out "$out/prompts.$part.npz" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
$trainer generate --target $target --prompts "$out"/prompts.?.npz --out "$out/own.npz" \
  --max-new-tokens 160 --batch-size 4096 --temperatures 0 0 0.7 1 --seed "$seed"
$trainer token-map --target $target --data "$out/own.npz" --size 2048 --out "$out/token_map.json"

train_head() { # name, then flags
  $trainer train --target $target --out "$out/$1" ${heads:+--init "$heads/$1"} \
    --data "$out/own.npz=$share" --data "$tokens=1" --seed "$seed" \
    --seconds "$seconds" --steps 1000000 --batch-size 64 --window 512 --optimiser muon --compile \
    --rate "$rate" --hard 0.2 --num-heads 4 --num-kv-heads 1 --head-dim 64 --log-every 20 "${@:2}" \
    > "$out/$1.txt" 2>&1
}
jobs=()
train_head eagle --algorithm EAGLE --intermediate-size 320 --unroll 5 --regression 0.1 & jobs+=($!)
train_head eagle3 --algorithm EAGLE3 --intermediate-size 320 & jobs+=($!)
train_head mtp --algorithm MTP --intermediate-size 320 --unroll 5 & jobs+=($!)
train_head dflash --algorithm DFLASH --intermediate-size 192 --num-layers 2 --feature-layers 3 5 \
  --mask-token-id 3 & jobs+=($!)
for job in "${jobs[@]}"; do wait "$job"; done
cat "$out"/{eagle,eagle3,mtp,dflash}.txt | grep -v 'Loading weights' || true

$trainer evaluate --target $target --dtype float32 --prompts "$questions" --steps 5 \
  --head "$out"/{eagle,eagle3,mtp,dflash} --batch-size 80 --out "$out/evaluation.json"
