# The pipeline in an image, for CPUs or for NVIDIA GPUs:
#
#   docker build --target cpu -t torchrec-pipeline:cpu .
#   docker build --target gpu -t torchrec-pipeline:gpu .
#
# Both hold the wheel of this tree in /opt/venv and run as user 1000 or any other, in /workspace. There is no entry point:
# what is to run is the command (TorchX's local_docker needs it so). docs/cluster.md says what was built and tried.
ARG BASE=debian:12.11-slim

FROM ${BASE} AS python
# Debian renews its packages within a release; a pinned version would be gone with the next security update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1


FROM python AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv
WORKDIR /src
# What the wheel will ask for, before its sources are there: a change of code does not install torch again.
COPY setup.cfg constraints.txt ./
RUN for extra in cpu gpu; do python -c "import configparser, sys; file = configparser.ConfigParser(interpolation=None); \
    file.read('setup.cfg'); extras = file['options.extras_require']; \
    print(file['options']['install_requires'], extras[sys.argv[1]], extras['s3'])" "$extra" > "requirements.$extra.txt" || exit 1; done


FROM build AS wheel
# hadolint ignore=DL3013
RUN pip install --target /opt/build build setuptools
COPY . .
RUN PYTHONPATH=/opt/build python -m build --wheel --no-isolation --outdir /wheel


FROM build AS cpu-venv
# PyPI's torch for Linux is the CUDA one, ten times as large.
ARG CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCHREC=torchrec==1.9.2
# hadolint ignore=DL3013
RUN pip install --extra-index-url "$CPU_TORCH_INDEX" -r requirements.cpu.txt -c constraints.txt \
    && pip install --no-deps "$TORCHREC"
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip


FROM build AS gpu-venv
ARG TORCHREC=torchrec==1.9.2
# hadolint ignore=DL3013
RUN pip install -r requirements.gpu.txt -c constraints.txt \
    && pip install --no-deps "$TORCHREC"
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip


FROM python AS runtime
LABEL org.opencontainers.image.title="torchrec-pipeline" org.opencontainers.image.licenses="MIT"
# Some libraries look the user up by name, and an arbitrary id has none; caches need a place that any user may write.
ENV HOME=/workspace USER=pipeline TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor NUMBA_CACHE_DIR=/tmp/numba \
    MPLCONFIGDIR=/tmp/matplotlib
RUN useradd --uid 1000 --gid 0 --no-create-home --home-dir /workspace pipeline \
    && mkdir /workspace && chmod 1777 /workspace
WORKDIR /workspace
CMD ["python", "-m", "pipeline.doctor"]


FROM runtime AS gpu
# torch.compile builds its kernels' launchers with a C compiler. The driver comes from the host (NVIDIA's container toolkit).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=gpu-venv /opt/venv /opt/venv
USER 1000


FROM runtime AS cpu
COPY --from=cpu-venv /opt/venv /opt/venv
# A fresh container would compile for half a minute, in every rank at once. On another kind of CPU it compiles anew, as any user.
ENV NUMBA_CACHE_DIR=/opt/numba
RUN python -m pipeline.precompile && chmod -R a+rwX /opt/numba
USER 1000
