# The pipeline in an image, for CPUs or for NVIDIA GPUs:
#
#   docker build --target cpu -t torchrec-pipeline:cpu .
#   docker build --target gpu -t torchrec-pipeline:gpu .
#
# Both hold the wheel of this tree in /opt/venv and run as user 1000 or any other, in /workspace. There is no entry point:
# what is to run is the command (TorchX's local_docker needs it so). docs/do/cluster.md says what was built and tried.
#
# The digest is that of the index of debian:12.11-slim, for all platforms. Another: docker buildx imagetools inspect TAG
ARG BASE=debian:12.11-slim@sha256:b1a741487078b369e78119849663d7f1a5341ef2768798f7b7406c4240f86aef

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
COPY setup.cfg constraints.txt requirements.lock ./
# Further extras of setup.cfg, separated by commas: ray, sweep, otlp, kafka, ...
ARG EXTRAS=
RUN for set in cpu gpu; do python -c "import configparser, sys; file = configparser.ConfigParser(interpolation=None); \
    file.read('setup.cfg'); extras = file['options.extras_require']; names = [sys.argv[1], 's3', 'serve', *sys.argv[2:]]; \
    print(file['options']['install_requires'], *(extras[name] for name in ','.join(names).split(',') if name))" \
    "$set" "$EXTRAS" > "requirements.$set.txt" || exit 1; done


FROM build AS wheel
RUN pip install --target /opt/build build==1.6.1 setuptools==84.2.1 packaging==26.4 pyproject_hooks==1.3.3
COPY . .
RUN PYTHONPATH=/opt/build python -m build --wheel --no-isolation --outdir /wheel


FROM build AS cpu-venv
# PyPI's torch for Linux is the CUDA one, ten times as large.
ARG CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCHREC=torchrec==1.9.2
# What requirements.lock names is installed only if its SHA-256 is right. torch and FBGEMM are pinned by version: they have
# builds for CPU and for CUDA, from different indexes.
# hadolint ignore=DL3013
RUN pip install --require-hashes --no-deps -r requirements.lock \
    && pip install --extra-index-url "$CPU_TORCH_INDEX" -r requirements.cpu.txt -c constraints.txt \
    && pip install --no-deps "$TORCHREC"
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip


FROM build AS gpu-venv
ARG TORCHREC=torchrec==1.9.2
# hadolint ignore=DL3013
RUN pip install --require-hashes --no-deps -r requirements.lock \
    && pip install -r requirements.gpu.txt -c constraints.txt \
    && pip install --no-deps "$TORCHREC"
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl && pip uninstall -y pip


FROM python AS runtime
LABEL org.opencontainers.image.title="torchrec-pipeline" org.opencontainers.image.licenses="MIT"
# Some libraries look the user up by name, and an arbitrary id has none. Caches of compilers hold code: each process makes
# them in a folder of its own user with mode 0700 (pipeline/devices/cpu/process.py), so none is set here.
ENV HOME=/workspace USER=pipeline
RUN useradd --uid 1000 --gid 0 --no-create-home --home-dir /workspace pipeline \
    && mkdir /workspace && chmod 1777 /workspace
WORKDIR /workspace
CMD ["python", "-m", "pipeline", "doctor"]


FROM runtime AS gpu
# torch.compile builds its kernels' launchers with a C compiler. NCCL loads libibverbs where there is InfiniBand or RoCE, and
# the providers are the drivers of its adapters. The GPU's driver comes from the host (NVIDIA's container toolkit).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc ibverbs-providers libc6-dev libibverbs1 librdmacm1 python3-dev \
    && rm -rf /var/lib/apt/lists/*
# EFA, the network of AWS: a version of AWS's installer and its checksum. It brings libfabric and aws-ofi-nccl, NCCL's plugin for it.
ARG EFA_INSTALLER=
ARG EFA_SHA256=
# hadolint ignore=DL3003
RUN [ -z "$EFA_INSTALLER" ] || { \
    url="https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_INSTALLER.tar.gz" \
    && python3 -c "import sys, urllib.request; urllib.request.urlretrieve(sys.argv[1], '/tmp/efa.tar.gz')" "$url" \
    && echo "$EFA_SHA256  /tmp/efa.tar.gz" > /tmp/efa.sha256 && sha256sum --check /tmp/efa.sha256 \
    && tar -xzf /tmp/efa.tar.gz -C /tmp && cd /tmp/aws-efa-installer && apt-get update \
    && ./efa_installer.sh --yes --skip-kmod --skip-limit-conf --no-verify \
    && find /opt/amazon -name 'lib*.so*' -printf '%h\n' > /etc/ld.so.conf.d/amazon.conf && ldconfig \
    && rm -rf /tmp/efa.* /tmp/aws-efa-installer /var/lib/apt/lists/*; }
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=gpu-venv /opt/venv /opt/venv
# Planning, evaluating and serving use CPU kernels here too; a host without a driver compiles them all the same.
ENV NUMBA_CACHE_DIR=/opt/numba
# Kernels are pickles, so only root may change them; a process copies them to a folder of its user.
RUN python -m pipeline precompile && chmod -R a+rX,go-w /opt/numba
USER 1000


FROM runtime AS cpu
COPY --from=cpu-venv /opt/venv /opt/venv
# A fresh container would compile for half a minute, in every rank at once. On another kind of CPU it compiles anew, as any user.
ENV NUMBA_CACHE_DIR=/opt/numba
# Kernels are pickles, so only root may change them; a process copies them to a folder of its user.
RUN python -m pipeline precompile && chmod -R a+rX,go-w /opt/numba
USER 1000
