# SGLang in an environment of its own beside the supervisor's: their pins never meet.
ARG ATTUNE_IMAGE=attune
FROM ${ATTUNE_IMAGE}
ARG TORCH_ARGS=""
USER root
COPY requirements/engine.txt requirements/
RUN python -m venv .venv-engine \
    && .venv-engine/bin/pip install --no-cache-dir ${TORCH_ARGS} torch==2.13.0 \
    && .venv-engine/bin/pip install --no-cache-dir -r requirements/engine.txt \
    && .venv-engine/bin/pip install --no-cache-dir --no-deps sglang==0.5.23 torchvision==0.28.0 \
    && .venv-engine/bin/pip install --no-cache-dir --no-deps --no-build-isolation ./workers/engine/plugin
USER attune
CMD ["engine"]
