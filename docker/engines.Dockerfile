# A host of engines on NVIDIA GPUs: an agent and vLLM, without what only ranks need. docs/hosts.md says how they are used.
#   docker build --file docker/engines.Dockerfile --tag megatron-rl-engines .
#   docker run --gpus all --ipc host --network host --volume "$PWD/token:/token:ro" megatron-rl-engines \
#       --listen 10.0.0.2:7100 --token-file /token --folder /var/log/engines
FROM python:3.12-slim-bookworm

# Triton and vLLM compile small C files when they start. Debian keeps no older releases, so none is named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc libc6-dev libnuma1 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megatron_rl
ENV VIRTUAL_ENV=/opt/megatron_rl/.venv-cuda
ENV PATH=/opt/megatron_rl/.venv-cuda/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

# The packages form a layer of their own, which a change of the code does not install again.
COPY requirements/cuda.lock requirements/cuda.lock
RUN grep --invert-match --extended-regexp '^(megatron-core|bokeh|matplotlib|tensorboard)==' requirements/cuda.lock \
        > requirements/engines.lock \
    && python3.12 -m venv "$VIRTUAL_ENV" \
    && pip install --disable-pip-version-check --no-deps --requirement requirements/engines.lock

COPY . .
RUN pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .

EXPOSE 7100 7101
ENTRYPOINT ["python", "-m", "megatron_rl.sidecar.agent"]
CMD ["--help"]
