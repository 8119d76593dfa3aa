# The gateway: OpenAI HTTP in front of targets. Has no torch.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt docker/requirements.py ./
RUN python -m venv /opt/outrider \
 && python requirements.py gateway tracing > requirements.txt \
 && /opt/outrider/bin/pip install --no-cache-dir --constraint constraints.txt \
      --requirement requirements.txt
COPY . .
RUN /opt/outrider/bin/pip install --no-cache-dir --no-deps .

FROM ${BASE_IMAGE}
RUN useradd --system --uid 10001 --no-create-home outrider
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["outrider-gateway"]
