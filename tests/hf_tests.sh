#!/usr/bin/env bash
# Hugging Face's own model tests (ModelTesterMixin, ConfigTester) and the contract checks beside them, on every family.
# Called by `make hf-tests`, which sets PYTHON and HF_COMMON (a folder with run.sh); FAMILY=MAT runs one family's.
set -uo pipefail
[ -x "${HF_COMMON:?}/run.sh" ] || [ -f "$HF_COMMON/run.sh" ] || { echo "error: no run.sh in $HF_COMMON; set HF_COMMON" >&2; exit 2; }

# init_std: the harness multiplies weights by 5 and then compares back-ends to 1e-5, which Xavier weights are too large for
base='"vocab_size": 99, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 100,
"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 3, "init_std": 0.02'
failed=0

family() {  # family CLASS_PREFIX EXTRA_FIELDS
  [ "${FAMILY:-$1}" = "$1" ] || return 0
  echo "== $1 {${2#, }}"
  bash "$HF_COMMON/run.sh" hf_deepwide "$1Config" "$1Model" "$1ForConditionalGeneration" "{$base$2}" 2>&1 | tail -n 12
  [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
}

# Without a choice models run sdpa, and tests that need attention weights switch to eager; asking for sdpa forbids that.
for norm in false true; do
  for attention in '' ', "attn_implementation": "eager"'; do
    style=", \"normalize_before\": $norm$attention"
    family VanillaTransformer "$style"
    family MAT "$style, \"attention_branches\": 1"
    family MAT "$style, \"attention_branches\": 3"
  done
done
# the vanilla family's ways to train deep stacks
family VanillaTransformer ', "residual": "rezero"'
family VanillaTransformer ', "layer_aggregation": "dlcl"'
family VanillaTransformer ', "layer_aggregation": "dlcl", "normalize_before": true'
family VanillaTransformer ', "layer_drop": 0.3, "normalize_before": true'
# latent depth: both stacks (LL-Both) and the decoder alone (LL-D), hard and soft selection
for stacks in '' ', "latent_encoder": false'; do
  for selection in hard soft; do
    for attention in '' ', "attn_implementation": "eager"'; do
      family LatentDepth "$stacks, \"inference_selection\": \"$selection\"$attention"
    done
  done
done
# Multi-Path, with and without more features, which n < 3 has none of
for paths in 1 2 4; do
  for more in false true; do
    for attention in '' ', "attn_implementation": "eager"'; do
      family MultiPath ", \"encoder_paths\": $paths, \"more_features\": $more$attention"
    done
  done
done
family MultiPath ', "encoder_paths": 4, "path_norm": false, "normalize_before": false'
# depth-wise LSTM: ways to merge, ways to share, and its options
for merge in add concat two_lstms; do
  for attention in '' ', "attn_implementation": "eager"'; do
    family DepthwiseLSTM ", \"decoder_merge\": \"$merge\"$attention"
  done
done
for gates in none stack global; do
  for hidden in none stack global; do
    family DepthwiseLSTM ", \"share_gates\": \"$gates\", \"share_hidden\": \"$hidden\""
  done
done
family DepthwiseLSTM ', "decoder_merge": "two_lstms", "share_gates": "global", "share_hidden": "global"'
family DepthwiseLSTM ', "cell": "rnn", "lstm_hidden": "single", "cross_query": "residual"'
family DepthwiseLSTM ', "lstm_bias": true, "attn_input_norm": false, "final_layer_norm": true, "attention_branches": 2'
exit $failed
