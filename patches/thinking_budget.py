"""thinking_token_budget on the V2 runner, beside a drafter and without one.

0.27.1's V2 runner warns at the start and refuses each request that has a budget, and a DFlash2 draft has
no other runner. Here the sampler forces the end of thinking in each row before it is verified, at a
budget that ends within a block too. Which tokens are forced is what V1 decides without a drafter. Models
with a sampler of their own (diffusion) are refused as before.
"""

from _patchlib import Hunk, Marker, Patch

CONFIG = "vllm/config/vllm.py"
INPUT = "vllm/v1/engine/input_processor.py"
RUNNER = "vllm/v1/worker/gpu/model_runner.py"
SAMPLER = "vllm/v1/worker/gpu/sample/sampler.py"

PATCH = Patch(
    name="thinking-budget",
    why="requests with a thinking_token_budget were refused on the V2 runner",
    upstream="ThinkingBudgetState of vLLM 0.28.0",
    shipped_in="0.28.0",
    hunks=(
        Hunk(
            CONFIG,
            "VllmConfig._validate_v2_model_runner",
            old="        if self.reasoning_config is not None:\n",
            new="""\
        is_diffusion = self.model_config is not None and self.model_config.is_diffusion
        if self.reasoning_config is not None and is_diffusion:
""",
        ),
        Hunk(
            INPUT,
            "InputProcessor._validate_params",
            old="                if self.use_v2_model_runner:\n",
            new="                if self.use_v2_model_runner and self.model_config.is_diffusion:\n",
        ),
        Hunk(
            RUNNER,
            "GPUModelRunner.load_model",
            old="                use_fp64_gumbel=self.model_config.use_fp64_gumbel,\n",
            new="""\
                use_fp64_gumbel=self.model_config.use_fp64_gumbel,
                reasoning_config=self.vllm_config.reasoning_config,
""",
        ),
        Hunk(
            RUNNER,
            "GPUModelRunner.add_requests",
            old="                assert self.prompt_logprobs_worker is not None\n",
            new="""\
                if isinstance(self.sampler, Sampler):
                    self.sampler.thinking_budget_state.add_request(
                        req_index,
                        new_req_data.prompt_token_ids,
                        new_req_data.sampling_params,
                    )
                assert self.prompt_logprobs_worker is not None
""",
        ),
        Hunk(
            SAMPLER,
            "",
            old="from vllm.v1.worker.gpu.states import RequestState\n",
            new="""\
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState
from vllm.v1.worker.gpu.states import RequestState
""",
        ),
        Hunk(
            SAMPLER,
            "Sampler",
            old="""\
    def __init__(
        self,
        max_num_reqs: int,
""",
            new="""\
    # For samplers with a constructor of their own: no request has a budget.
    thinking_budget_state = ThinkingBudgetState(None, None)

    def __init__(
        self,
        max_num_reqs: int,
""",
        ),
        Hunk(
            SAMPLER,
            "Sampler.__init__",
            old="        use_fp64_gumbel: bool = False,\n",
            new="""\
        use_fp64_gumbel: bool = False,
        reasoning_config=None,
""",
        ),
        Hunk(
            SAMPLER,
            "Sampler.__init__",
            old="        self.bad_words_state = BadWordsState(req_states)\n",
            new="""\
        self.bad_words_state = BadWordsState(req_states)
        self.thinking_budget_state = ThinkingBudgetState(req_states, reasoning_config)
""",
        ),
        Hunk(
            SAMPLER,
            "Sampler.apply_staged_writes",
            old="        self.bad_words_state.apply_staged_writes()\n",
            new="""\
        self.bad_words_state.apply_staged_writes()
        self.thinking_budget_state.apply_staged_writes()
""",
        ),
        Hunk(
            SAMPLER,
            "Sampler.apply_sampling_params",
            old="        # Apply temperature in place.\n",
            new="""\
        # Force the end of thinking in place.
        if self.thinking_budget_state.limits(idx_mapping_np):
            self.thinking_budget_state.apply(
                logits, expanded_idx_mapping, input_ids, expanded_local_pos
            )

        # Apply temperature in place.
""",
        ),
        Hunk(
            SAMPLER,
            "Sampler._requires_logits_processing",
            old="        if np.any(self.logit_bias_state.use_logit_bias[idx_mapping_np]):\n",
            new="""\
        if self.thinking_budget_state.limits(idx_mapping_np):
            return True
        if np.any(self.logit_bias_state.use_logit_bias[idx_mapping_np]):
""",
        ),
    ),
    defines=((SAMPLER, "Sampler"),),
    shipped=((Marker(SAMPLER, "Sampler.__init__", "ThinkingBudgetState("),),),
)
