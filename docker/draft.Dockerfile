# The draft: attaches to targets and streams candidate trees.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# Where pip looks for torch besides PyPI: CPU builds by default, because PyPI's bring gigabytes of
# CUDA. A page of links or a folder; https://download.pytorch.org/whl/cu130/torch/ for GPUs.
ARG TORCH_WHEELS=https://download.pytorch.org/whl/cpu/torch/
WORKDIR /src
COPY pyproject.toml constraints.txt docker/requirements.py ./
RUN python -m venv /opt/outrider \
 && python requirements.py engine tracing > requirements.txt \
 && /opt/outrider/bin/pip install --no-cache-dir --constraint constraints.txt \
      --find-links "${TORCH_WHEELS}" --requirement requirements.txt
COPY . .
RUN /opt/outrider/bin/pip install --no-cache-dir --no-deps . ./packaging/demo

FROM ${BASE_IMAGE}
RUN useradd --system --uid 10001 --no-create-home outrider
COPY --from=build /opt/outrider /opt/outrider
# Triton comes with torch's CUDA builds alone. When a service starts it compiles its launcher, and
# loads it from its cache: a volume of compose.gpu.yaml, since nothing in /tmp may be executed.
RUN if ls -d /opt/outrider/lib/python3*/site-packages/triton; then \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi \
 && install --directory --mode 1777 /var/cache/triton
ENV PATH=/opt/outrider/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001
WORKDIR /tmp
EXPOSE 50061 50062
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s --retries=3 \
  CMD ["python", "-m", "shared.rpc.healthcheck", "127.0.0.1:50061"]
ENTRYPOINT ["outrider-draft"]
