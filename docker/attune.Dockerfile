# One image for the API, the workers, beat and the trainer: the role is the command.
FROM python:3.11-slim
ARG TORCH_ARGS=""
WORKDIR /attune
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY requirements/attune.txt requirements/
RUN pip install --no-cache-dir ${TORCH_ARGS} torch==2.13.0 && pip install --no-cache-dir -r requirements/attune.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . && useradd --create-home attune && mkdir /data && chown attune /data
USER attune
ENV ATTUNE_HOME=/data OMP_NUM_THREADS=1
ENTRYPOINT ["attune"]
CMD ["serve"]
