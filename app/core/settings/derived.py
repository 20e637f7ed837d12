"""The trainer's configuration, derived from the settings."""

from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.config.trainer import LoRAConfig, TrainerConfig
from app.core.settings.root import DEFAULT_EPOCHS, Settings


def derived_values(settings: Settings) -> dict[str, object]:
    """Return, by path, the values that apply where a setting is unset or another setting limits it."""
    trainer, config = settings.trainer, trainer_config(settings)
    return {
        "database.url": settings.database_url,
        "engine.python": str(settings.engine.interpreter),
        "engine.tool_call_parser": settings.engine.effective_tool_call_parser,
        "algorithm": config.algorithm.model_dump(mode="json"),
        "trainer.min_batch_size": trainer.smallest_batch,
        "trainer.max_batch_size": trainer.largest_batch,
        "trainer.kl_target": config.kl_target,
        "trainer.optim.lr": config.optim.lr,
        "trainer.reward_model.lr": config.reward_model.lr if config.reward_model else None,
    }


def trainer_config(settings: Settings) -> TrainerConfig:
    """Return the trainer's configuration. What an algorithm's own settings leave open, the deployment's decide."""
    trainer = settings.trainer
    optim = trainer.optim.model_copy(update={"lr": _learning_rate(settings)})
    return TrainerConfig(
        algorithm=_algorithm(settings),
        lora=lora_config(settings),
        critic=trainer.critic,
        optim=optim,
        reward_model=trainer.reward_model
        if settings.is_set("trainer.reward_model.lr")
        else trainer.reward_model.model_copy(update={"lr": trainer.optim.lr}),
        micro_batch_tokens=trainer.micro_batch_tokens,
        packing=trainer.packing,
        logits_chunk=trainer.logits_chunk,
        activation_checkpointing=trainer.activation_checkpointing,
        dp_shard=trainer.dp_shard,
        kl_target=trainer.update_kl_target,
        max_mismatch=trainer.max_mismatch,
        seed=trainer.seed,
        dtype=settings.dtype,
        device=trainer.device,
    )


def lora_config(settings: Settings) -> LoRAConfig | None:
    """Return the shape of the adapters that the deployment trains, or None where it trains all weights."""
    return settings.trainer.lora if settings.trainer.adaptation == "lora" else None


def _algorithm(settings: Settings) -> AlgorithmConfig:
    """Return the algorithm with the deployment's defaults."""
    algorithm = settings.algorithm
    general: dict[str, object] = {}
    if algorithm.type != "custom":  # whose own defaults hold
        general["epochs"] = DEFAULT_EPOCHS
    if settings.observability.length_range:
        general |= dict(zip(("shortest", "longest"), settings.observability.length_range, strict=True))
    unset_fields = type(algorithm).model_fields.keys() - algorithm.model_fields_set
    values = {name: value for name, value in general.items() if name in unset_fields}
    return algorithm.model_copy(update=values)


def _learning_rate(settings: Settings) -> float:
    """Return the learning rate; the default for full weights is a tenth of the default for an adapter."""
    is_as_set = lora_config(settings) is not None or settings.is_set("trainer.optim.lr")
    return settings.trainer.optim.lr if is_as_set else settings.trainer.optim.lr / 10
