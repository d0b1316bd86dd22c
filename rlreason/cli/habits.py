"""What people type who come from another program, or from another algorithm of this one: tables of suggestions.

Nothing here is translated: `aliases.py` holds the names that are.
"""

#: What other programs call a setting: suggested, not translated, since theirs may differ in a unit or a default.
HABITS: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    **dict.fromkeys(("batch_size", "bs"), ("train_batch_size", "micro_batch_tokens")),
    **dict.fromkeys(("steps", "num_steps", "max_steps", "total_steps", "train_steps"), ("n_steps",)),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), ("epochs_per_rollout", "sft_epochs", "epochs")),
    **dict.fromkeys(
        ("max_length", "max_new_tokens", "max_completion_length", "max_response_length"), ("sampling.max_tokens",)
    ),
    **dict.fromkeys(("temp", "t"), ("sampling.temperature",)),
    **dict.fromkeys(("beta", "kl", "kl_weight"), ("kl_coef",)),
    **dict.fromkeys(("num_generations", "num_samples", "n_samples"), ("group_size", "samples")),
    **dict.fromkeys(("clip", "clip_eps", "clip_range", "epsilon"), ("loss.cliprange",)),
    "wd": ("weight_decay",),
    **dict.fromkeys(("warmup", "num_warmup_steps"), ("warmup_steps",)),
    **dict.fromkeys(("grad_clip", "clip_grad", "gradient_clipping", "max_norm"), ("max_grad_norm",)),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), ("lr_schedule",)),
    **dict.fromkeys(("betas", "beta1", "beta2"), ("adam_betas",)),
    **dict.fromkeys(("per_device_train_batch_size", "mini_batch_size"), ("micro_batch_size",)),
    **dict.fromkeys(("lora_rank", "lora_r", "r"), ("model.lora.rank",)),
    **dict.fromkeys(("model_name", "model_path", "model_name_or_path"), ("model.path", "model")),
    **dict.fromkeys(("dataset", "dataset_name", "train_file"), ("data", "data.path")),
    **dict.fromkeys(("output", "output_dir", "out_dir", "save_dir"), ("hydra.run.dir",)),
    **dict.fromkeys(("wandb", "report_to", "use_wandb"), ("logger",)),
    **dict.fromkeys(("engine", "backend", "use_vllm"), ("rollout",)),
    **dict.fromkeys(("reward", "reward_fn", "reward_func", "reward_funcs"), ("prompt.reward",)),
}

_OF_GRPO_IN_EI = {
    "rollout_batch_size": "question_batch_size, the questions of a step, each with group_size responses",
    "epochs_per_rollout": "sft_epochs",
}
#: By algorithm: what does there what a setting of another algorithm does.
EQUIVALENTS: dict[str, dict[str, str]] = {
    "grpo": {
        "question_batch_size": "rollout_batch_size, which counts responses: questions times group_size",
        **dict.fromkeys(("sft_epochs", "epochs"), "epochs_per_rollout"),
        "samples": "group_size",
    },
    "ei": {**_OF_GRPO_IN_EI, "epochs": "sft_epochs", "samples": "group_size"},
    "sft": {
        **dict.fromkeys(("epochs_per_rollout", "sft_epochs"), "epochs"),
        **dict.fromkeys(("rollout_batch_size", "question_batch_size"), "train_batch_size"),
    },
    "evaluate": {"group_size": "samples", "n_list": "samples"},
    "best_of_n": {"group_size": "n_list"},
}
