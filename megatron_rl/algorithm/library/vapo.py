"""VAPO: PPO with a critic that learns from whole returns, and a lambda that grows with the response."""

from megatron_rl.algorithm.declaration import Algorithm, Paper, Preset

VAPO = Algorithm(
    Paper("VAPO", "https://arxiv.org/abs/2504.05118"),
    presets=(
        Preset(
            "vapo",
            {
                "loss": "clip",
                "clamp_eps_lower": 0.2,
                "clamp_eps_upper": 0.28,
                "advantage": "gae",
                "critic_lambda": 1.0,
                "gae_length_alpha": 0.05,
                "aggregation": "token",
            },
            remark="needs `--critic`; write `--critic-warmup-iters` too",
        ),
    ),
)
