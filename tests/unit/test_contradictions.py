"""Flags that contradict each other, and their errors."""

import pytest

from megatron_rl.command_line import flags
from tests.command_lines import DENSE, LINEAR, SPARSE, error, parse


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tensor-model-parallel-size 3", "does not divide the 8 attention heads: write one of 1, 2, 4"),
        ("--tensor-model-parallel-size 8", "does not divide the 4 query groups: write one of 1, 2, 4"),
        ("--pipeline-model-parallel-size 3", "does not divide the 8 layers: write one of 1, 2, 4, 8"),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 8",
            "there are 0 layers for 1 stages",
        ),
        ("--decoder-last-pipeline-num-layers 2", "needs at least 2 stages"),
        ("--num-virtual-stages-per-pipeline-rank 2", "virtual pipeline stages need --pipeline-model-parallel-size"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "does not divide the 4 layers of a pipeline stage: write one of 1, 2, 4",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
            "do not divide the 4 layers of a pipeline rank",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2",
            "set the same number",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            "gives wrong results without an error: drop the flag",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            "--no-overlap-p2p-communication with virtual pipeline stages (--num-virtual-stages-per-pipeline-rank 2)",
        ),
        ("--context-parallel-size 3", "attention heads of a tensor-parallel rank: write one of 1, 2, 4, 8"),
        ("--context-parallel-size 4 --tensor-model-parallel-size 4", "does not divide the 2 attention heads"),
        ("--context-parallel-size 0", "--context-parallel-size 0 must be at least 1"),
        ("--expert-model-parallel-size 2", "needs a model with experts"),
        ("--expert-tensor-parallel-size 2", "needs a model with experts"),
        ("--moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff 0.01 needs a model with experts"),
        ("--moe-z-loss-coeff 0.01", "--moe-z-loss-coeff 0.01 needs a model with experts"),
        ("--grpo-replay-routing", "--grpo-replay-routing is for models with experts, and this one has none: drop it"),
        ("--overlap-p2p-communication-warmup-flush", "needs virtual pipeline stages"),
        ("--moe-router-topk 2", "--moe-router-topk 2 has no effect without --num-experts"),
        ("--rotary-scaling-factor 4", "--rotary-scaling-factor 4 has no effect without --position-embedding-type yarn"),
        ("--recompute-granularity selective --recompute-modules moe", "moe: the model has no module of that name"),
        ("--recompute-modules core_attn", "needs --recompute-granularity selective"),
        ("--use-nccl-ub", "--use-nccl-ub registers buffers with NCCL"),
        ("--grpo-loss reinforce --grpo-clamp-eps-lower 0.1", "--grpo-clamp-eps-lower 0.1 needs --grpo-loss clip, gspo"),
        ("--algorithm sapo --grpo-dual-clip 3", "--grpo-dual-clip 3 needs --grpo-loss clip or gspo"),
        ("--sapo-temperature-neg 2", "--sapo-temperature-neg 2 needs --grpo-loss sapo"),
        ("--grpo-dual-clip 1", "--grpo-dual-clip 1 must be above 1"),
        ("--grpo-kl-estimator k2", "--grpo-kl-estimator k2 needs --grpo-kl-beta"),
        ("--grpo-kl-in reward", "--grpo-kl-in reward needs --grpo-kl-beta"),
        (
            "--grpo-kl-beta 0.1 --grpo-kl-estimator k1",
            "--grpo-kl-estimator k1 in the loss has a gradient whose mean is 0",
        ),
        *(
            (
                f"--grpo-kl-beta 0.1 --grpo-kl-in reward --grpo-kl-estimator {estimator}",
                f"--grpo-kl-estimator {estimator} in the reward hardly pulls towards the reference, since the first "
                "order of its effect cancels: write k1, or --grpo-kl-in loss",
            )
            for estimator in ("k2", "k3", "k3+", "unbiased")
        ),
        ("--grpo-correction-level sequence", "needs --rl-inference-logprobs-is-correction"),
        (
            "--rl-inference-logprobs-is-correction --grpo-correction-mode mask",
            "--grpo-correction-mode mask needs a bound",
        ),
        (
            "--use-tis --grpo-correction-lower 2 --rl-importance-sampling-truncation-coef 1",
            "--grpo-correction-lower 2 must be below --rl-importance-sampling-truncation-coef 1",
        ),
        ("--grpo-reject-below 1.1 --grpo-reject-above 1.1", "--grpo-reject-below 1.1 must be below"),
        ("--algorithm reinforce_plus_plus_baseline --grpo-kl-beta 0.1 --grpo-kl-in loss", "write --grpo-kl-in reward"),
        ("--grpo-reward-min 1 --grpo-reward-max 1", "--grpo-reward-min 1 must be below --grpo-reward-max 1"),
        ("--grpo-advantage batch --grpo-entropy-coef 0.1", "would divide this term too: drop one of them"),
        ("--grpo-filter-by sum", "--grpo-filter-by sum needs --grpo-filter-groups-with-same-reward"),
        (
            "--rollout-env game.py:Game --grpo-filter-groups-with-same-reward --grpo-filter-by exact",
            "--grpo-filter-by exact must be sum or a reward of the run: write one of sum, environment",
        ),
        (
            "--reward exact length:9,3 --grpo-filter-groups-with-same-reward --grpo-filter-by exat",
            "--grpo-filter-by exat must be sum or a reward of the run: write one of sum, exact, length",
        ),
        (
            "--algorithm dapo --grpo-advantage global",
            "have advantages too, and the gradient is biased without them: write --grpo-advantage batch",
        ),
        (
            "--algorithm dapo --rollout-endpoint http://a:1",
            "does not say which reward decides: write --grpo-filter-by sum",
        ),
        ("--grpo-spare-prompts 8", "--grpo-spare-prompts 8 needs --grpo-filter-groups-with-same-reward"),
        ("--algorithm gdpo --rollout-endpoint http://a:1", "write it beside --rollout-endpoint too"),
        ("--grpo-turn-credit", "--grpo-turn-credit needs --rollout-env"),
        ("--grpo-turn-credit --algorithm gdpo", "--grpo-advantage gdpo does more"),
        ("--algorithm gdpo --grpo-reward-max 1", "--grpo-reward-max 1 bounds the sum of the rewards"),
        ("--algorithm gdpo --grpo-kl-beta 0.1", "--grpo-kl-in loss and --grpo-advantage gdpo cannot be given together"),
        ("--algorithm grop", "--algorithm grop: not one of the choices (the nearest is grpo)"),
        ("--bf16 --fp16", "--bf16 and --fp16 cannot be given together"),
        ("--fp32-residual-connection", "the local layers compute in the parameters' dtype"),
        ("--grad-reduce-in-bf16", "needs --bf16"),
        ("--seq-length 129", "above the model's longest sequence, 128"),
        ("--recompute-granularity full", "needs --recompute-method"),
        ("--recompute-method uniform", "needs --recompute-granularity full"),
        ("--recompute-granularity selective --recompute-num-layers 1", "--recompute-num-layers 1 needs"),
        ("--overlap-param-gather", "needs --use-distributed-optimizer"),
        ("--overlap-param-gather --use-distributed-optimizer", "needs --overlap-grad-reduce"),
        (
            "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16",
            "TransformerEngine is not installed, and --use-precision-aware-optimizer needs it",
        ),
        ("--main-grads-dtype bf16", "--main-grads-dtype needs --use-precision-aware-optimizer"),
        ("--lr 1e-6 --min-lr 1e-5", "--min-lr 1e-05 must be between 0 and --lr 1e-06"),
        (
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 3",
            "--lr-warmup-fraction and --lr-warmup-iters cannot be given together",
        ),
        ("--lr-decay-iters 5 --lr-warmup-iters 5", "must be below --lr-decay-iters 5"),
        ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
        ("--start-weight-decay 0.1", "need --weight-decay-incr-style"),
        ("--save out --save-interval 4 --save-retain-interval 6", "must be a multiple of --save-interval 4"),
        ("--ckpt-step 3", "--ckpt-step needs --load"),
        (
            "--rollout-endpoint localhost:8000",
            "--rollout-endpoint localhost:8000 must be an address: write http://HOST:PORT",
        ),
        ("--rollout-endpoint 127.0.0.1:8000", "127.0.0.1:8000 must be an address: write http://HOST:PORT"),
        ("--rollout-endpoint http://", "http:// must be an address: write http://HOST:PORT"),
        ("--rollout-endpoint http://host:port", "http://host:port must be an address: write http://HOST:PORT"),
        ("--rollout-endpoint http://host:99999", "http://host:99999 must be an address: write http://HOST:PORT"),
        ("--rollout-endpoint http://host:0", "http://host:0 must be an address: write http://HOST:PORT"),
        ("--save-keep-last 0", "--save-keep-last 0 must be at least 1"),
        ("--optimizer sgd --use-distributed-optimizer", "--use-distributed-optimizer shards Adam only"),
        ("--lr -0.001", "--lr -0.001 must be finite and at least 0"),
        ("--lr 1 --lr-warmup-init 2", "--lr-warmup-init 2 must be between 0 and --lr 1"),
        ("--lr-warmup-iters -3", "--lr-warmup-iters -3 must be at least 0"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 0", "--lr-wsd-decay-iters 0 must be at least 1"),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0",
            "--start-weight-decay 0.1 must be between 0 and --end-weight-decay 0",
        ),
        ("--adam-beta1 1", "--adam-beta1 1 must be at least 0 and below 1"),
        ("--adam-beta2 -0.1", "--adam-beta2 -0.1 must be at least 0 and below 1"),
        ("--optimizer sgd --sgd-momentum 1.5", "--sgd-momentum 1.5 must be at least 0 and below 1"),
        ("--adam-eps=-1e-8", "--adam-eps -1e-08 must be at least 0"),
        ("--weight-decay -0.1", "--weight-decay -0.1 must be at least 0"),
        ("--clip-grad -1", "--clip-grad -1 must be at least 0"),
        ("--grpo-clamp-eps-lower -0.5", "--grpo-clamp-eps-lower -0.5 must be between 0 and 1"),
        ("--grpo-clamp-eps-lower 1.5", "--grpo-clamp-eps-lower 1.5 must be between 0 and 1"),
        ("--grpo-clamp-eps-upper -0.9", "--grpo-clamp-eps-upper -0.9 must be at least 0"),
        (
            "--grpo-kl-beta -1",
            "--grpo-kl-beta -1 must be finite and at least 0: a negative weight would reward divergence",
        ),
        (
            "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 0",
            "--rl-importance-sampling-truncation-coef 0 must be above 0: 0 zeroes every weight",
        ),
        (
            "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef -1",
            "--rl-importance-sampling-truncation-coef -1 must be above 0: 0 zeroes every weight, a negative cap flips "
            "its sign",
        ),
        (
            "--rl-importance-sampling-truncation-coef 2",
            "--rl-importance-sampling-truncation-coef 2 needs --rl-inference-logprobs-is-correction: add it",
        ),
        ("--rollout-start-minutes 0", "--rollout-start-minutes 0 must be a finite duration above 0"),
        ("--rollout-deadline-minutes -1", "--rollout-deadline-minutes -1 must be a finite duration above 0"),
        (
            "--rollout-verifiers tcp://127.0.0.1:5000 --rollout-deadline-minutes 10",
            "--rollout-agent-timeout 600 must be below 600 seconds, which is --rollout-deadline-minutes 10: else",
        ),
        ("--rollout-patience-seconds 0", "--rollout-patience-seconds 0 must be a finite duration above 0"),
        ("--rollout-lease-seconds inf", "--rollout-lease-seconds inf must be a finite duration above 0"),
        ("--publish-deadline-minutes -1", "--publish-deadline-minutes -1 must be a finite duration above 0"),
        ("--publish-probe-bound 0", "--publish-probe-bound 0 must be above 0: write a mean difference of log-probs"),
        (
            "--publish-agreement-bound 0",
            "--publish-agreement-bound 0 must be above 0: write a mean difference of log-probs",
        ),
        ("--rollout-mismatch-error -1", "--rollout-mismatch-error -1 must be above 0: write a mean difference"),
        ("--exit-grace-seconds -5", "--exit-grace-seconds -5 must be finite and at least 0"),
        ("--save out --save-hf ./out", "--save and --save-hf are both out"),
        ("--grpo-group-size 1", "--grpo-group-size 1 must be at least 2: a response is compared with the others"),
        ("--eval-interval 0", "--eval-interval 0 must be at least 1"),
        ("--grpo-kl-beta 0.1 --grpo-ref-interval 0", "--grpo-ref-interval 0 must be at least 1"),
        ("--num-virtual-stages-per-pipeline-rank 0", "--num-virtual-stages-per-pipeline-rank 0 must be at least 1"),
        ("--micro-batch-size 0", "--micro-batch-size 0 must be at least 1"),
        ("--make-vocab-size-divisible-by 0", "must be at least 1"),
        ("--rope-scaling-factor 8", "without --use-rope-scaling"),
        ("--yarn-beta-fast 8", "without --position-embedding-type yarn"),
        ("--kv-channels 7", "--kv-channels 7 must be even"),
        ("--completion-key answer", "--completion-key answer needs --stage sft, which reads responses: write that, or"),
        ("--messages-key chat", "--messages-key chat needs --stage sft, which reads responses"),
        (
            "--stage sft --reward exact",
            "--reward exact needs --stage grpo, which samples responses: write that, or drop --reward",
        ),
        ("--stage sft --algorithm dapo", "--algorithm dapo needs --stage grpo"),
        ("--stage sft --grpo-kl-beta 0.1", "--grpo-kl-beta 0.1 needs --stage grpo"),
        ("--stage sft --grpo-prompts-per-step 8", "--grpo-prompts-per-step 8 needs --stage grpo"),
        ("--stage sft --rollout-num-engines 2", "--rollout-num-engines 2 needs --stage grpo"),
        ("--stage sft --rollout-endpoint localhost:8000", "--rollout-endpoint localhost:8000 needs --stage grpo"),
        ("--stage sft --rollout-temperature 0.5", "--rollout-temperature 0.5 needs --stage grpo"),
        ("--stage sft --publish-probe-bound 1", "--publish-probe-bound 1 needs --stage grpo"),
        ("--stage sft --consume-order prompt", "--consume-order prompt needs --stage grpo"),
        ("--stage sft --no-shared-prompt", "--no-shared-prompt needs --stage grpo"),
        ("--stage sft --max-prompt-tokens 8", "--max-prompt-tokens 8 needs --stage grpo"),
        ("--stage sft --eval-num-samples 4", "--eval-num-samples 4 needs --stage grpo"),
        ("--stage sft --log-samples 1", "--log-samples 1 needs --stage grpo"),
        ("--stage dpo", "--stage dpo: not one of the choices"),
    ],
)
def test_a_contradiction_is_an_error_that_says_what_to_write(words: str, said: str) -> None:
    assert said in error(*DENSE, words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--linear-attention-freq 9", "write their number plus 1, from 2 to the 8 layers"),
        ("--linear-attention-freq [1]*8", "as many linear layers come before each layer of full attention"),
        ("--linear-attention-freq ([1]*3+[0]*5)", "as many linear layers come before each layer of full attention"),
        ("--linear-num-value-heads 6", "--linear-num-key-heads 4 does not divide the 6 value heads of linear layers"),
        ("--tensor-model-parallel-size 8", "does not divide the 4 key heads of linear layers"),
        ("--context-parallel-size 8", "does not divide the 4 key heads of linear layers of a tensor-parallel rank"),
        ("--linear-attention-backend flash-linear", "flash-linear-attention has no kernels for cpu): write torch"),
    ],
)
def test_linear_layers_that_cannot_be_divided_are_an_error_that_says_what_to_write(words: str, said: str) -> None:
    assert said in error(*LINEAR, words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--linear-attention-backend torch", "torch needs a model with linear layers, and this one has none"),
        ("--linear-num-key-heads 4", "has no effect without --experimental-attention-variant"),
        ("--experimental-attention-variant gated_delta_net", "needs --linear-attention-freq: add it"),
        ("--experimental-attention-variant dsa", "no supported model has it"),
    ],
)
def test_a_flag_of_linear_layers_in_a_model_without_them_is_an_error(words: str, said: str) -> None:
    assert said in error(*DENSE, words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--expert-model-parallel-size 3", "does not divide the 8 experts: write one of 1, 2, 4, 8"),
        ("--tensor-model-parallel-size 2", "add --sequence-parallel"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
            "--expert-tensor-parallel-size 2 (that of --tensor-model-parallel-size if it is not given) does not work",
        ),
        ("--expert-tensor-parallel-size 5", "does not divide the 48 columns of an expert"),
        (
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
            "--moe-router-load-balancing-type seq_aux_loss counts over one sequence",
        ),
        ("--grpo-replay-routing --rollout-replay-routing", "--grpo-replay-routing those of later ones: drop one"),
        ("--moe-layer-freq [1]*7", "describes 7 layers, and the model has 8"),
        ("--moe-layer-freq ([1]*7+[0])", "all layers have experts but the first ones"),
        ("--moe-layer-freq 2", "all layers have experts but the first ones"),
        ("--moe-aux-loss-coeff -0.01", "--moe-aux-loss-coeff -0.01 must be finite and at least 0"),
        ("--moe-z-loss-coeff inf", "--moe-z-loss-coeff inf must be finite and at least 0"),
        ("--moe-aux-loss-coeff 0.1 0.2", "--moe-aux-loss-coeff 0.1 0.2: one loss balances experts"),
        ("--moe-router-load-balancing-type aux_loss none", "aux_loss none: one loss balances experts"),
        (
            "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01",
            "--moe-aux-loss-coeff 0.01 weights a loss that --moe-router-load-balancing-type none leaves out",
        ),
    ],
)
def test_a_contradiction_about_experts_is_an_error_that_says_what_to_write(words: str, said: str) -> None:
    assert said in error(*SPARSE, words)


def test_more_active_experts_than_there_are_is_an_error() -> None:
    words = [*DENSE, "--qk-layernorm", "--num-experts", "8", "--moe-router-topk", "9"]
    assert "--moe-router-topk 9 must be between 1 and the 8 experts" in error(*words)


@pytest.mark.parametrize(
    ("world_size", "words", "said"),
    [
        (6, "--tensor-model-parallel-size 4", "6 ranks are not a multiple"),
        (6, "--context-parallel-size 4", "times --context-parallel-size 4: start a multiple of 4 ranks"),
        (8, "--micro-batch-size 2 --global-batch-size 24", "not a multiple of --micro-batch-size 2 times 8 replicas"),
        (
            8,
            "--context-parallel-size 2 --micro-batch-size 2 --global-batch-size 12",
            "not a multiple of --micro-batch-size 2 times 4 replicas",
        ),
        (
            2,
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 3",
            "3 micro-batches a replica do not fill the interleaved schedule of 2 stages",
        ),
    ],
)
def test_ranks_and_batches_must_divide(world_size: int, words: str, said: str) -> None:
    assert said in error(*DENSE, words, world_size=world_size)


def test_expert_ranks_must_divide_the_ranks() -> None:
    text = error(*SPARSE, "--expert-model-parallel-size 4", world_size=6)
    assert "6 ranks are not a multiple of --expert-model-parallel-size 4" in text


@pytest.mark.parametrize("endpoint", ["http://localhost:8000", "http://[::1]:8000", "https://rollout.example/run"])
def test_an_address_of_a_sidecar_is_taken_as_it_is(endpoint: str) -> None:
    assert parse(*DENSE, f"--rollout-endpoint {endpoint}").service.endpoint == endpoint


def test_without_a_launcher_the_number_of_ranks_is_not_checked() -> None:
    assert parse(*DENSE, "--tensor-model-parallel-size 4 --global-batch-size 7").training.global_batch_size == 7


def test_flags_that_megatron_core_itself_refuses_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise ValueError("a wing too many")

    monkeypatch.setattr(flags.import_configs()["transformer"], "__post_init__", refuse)
    version = flags.find_megatron_version()
    assert error(*DENSE) == f"megatron-core {version} refuses the transformer configuration: a wing too many"
