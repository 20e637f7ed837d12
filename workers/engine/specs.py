"""The spec of the engine that the settings describe, by its kind."""

from collections.abc import Callable

from app.core.settings import Settings
from app.core.settings.derived import lora_config
from app.core.settings.engine import EngineKind
from app.inference.keys import load_engine_keys
from app.inference.model_support import require_supported
from workers.base_model import adapter_spec, model_dir
from workers.engine.process import EngineSpec
from workers.engine.sglang_spec import SGLangSpec
from workers.engine.vllm_spec import VLLMSpec


def engine_spec(settings: Settings) -> EngineSpec:
    """Return the spec. Raises ValueError if the engine would not start, or compute the base model wrongly."""
    require_supported(settings, model_dir(settings.model, weights=False))
    return SPEC_BY_KIND[settings.engine.kind](settings)


def _sglang_spec(settings: Settings) -> SGLangSpec:
    keys = load_engine_keys(settings)
    engine = settings.engine
    return SGLangSpec(
        python=engine.interpreter,
        model=str(model_dir(settings.model)),
        api_key=keys.api,
        admin_key=keys.admin,
        log_path=settings.logs_dir / f"{engine.name}.{engine.kind}.log",
        host=engine.host,
        port=engine.port,
        device=engine.device,
        dtype=settings.dtype,
        adapter=adapter_spec(settings) if lora_config(settings) is not None else None,
        max_loras_per_batch=engine.max_loras_per_batch,
        tool_call_parser=engine.effective_tool_call_parser,
        context_length=engine.context_length,
        mem_fraction_static=engine.mem_fraction_static,
        max_total_tokens=engine.max_total_tokens,
        max_running_requests=engine.max_running_requests,
        chunked_prefill_size=engine.chunked_prefill_size,
        quantization=engine.quantization,
        kv_cache_dtype=engine.kv_cache_dtype,
        attention_backend=engine.attention_backend,
        tp_size=engine.tp_size,
        extra_flags=engine.extra_flags,
    )


def _vllm_spec(settings: Settings) -> VLLMSpec:
    """Raises ValueError for what vLLM cannot do here."""
    keys = load_engine_keys(settings)
    engine = settings.engine
    return VLLMSpec(
        python=engine.interpreter,
        model=str(model_dir(settings.model)),
        api_key=keys.api,
        admin_key=keys.admin,
        log_path=settings.logs_dir / f"{engine.name}.{engine.kind}.log",
        host=engine.host,
        port=engine.port,
        device=engine.device,
        dtype=settings.dtype,
        adapter=adapter_spec(settings),
        max_loras_per_batch=engine.max_loras_per_batch,
        tool_call_parser=engine.effective_tool_call_parser,
        context_length=engine.context_length,
        max_running_requests=engine.max_running_requests,
        extra_flags=engine.extra_flags,
    )


SPEC_BY_KIND: dict[EngineKind, Callable[[Settings], EngineSpec]] = {"sglang": _sglang_spec, "vllm": _vllm_spec}
