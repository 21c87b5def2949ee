# vLLM with DFlash2. Applying and checking are one layer: a base that has drifted fails the build.
#   docker build -t vllm-dflash2 .
#   docker build -t vllm-dflash2 --build-arg BASE_IMAGE=registry/image:tag .
ARG BASE_IMAGE=vllm/vllm-openai:v0.27.1
FROM ${BASE_IMAGE}

COPY apply_all.py _*.py requirements.txt /opt/dflash2/
COPY patches/ /opt/dflash2/patches/
COPY dflash2/ /opt/dflash2/dflash2/

# What the tool imports goes to a folder that is thrown away: the image gains the patches and nothing else.
RUN python3 -m pip install --quiet --no-cache-dir --target /tmp/dflash2-deps -r /opt/dflash2/requirements.txt \
 && PYTHONPATH=/tmp/dflash2-deps python3 /opt/dflash2/apply_all.py \
 && PYTHONPATH=/tmp/dflash2-deps python3 /opt/dflash2/apply_all.py --check \
 && rm -rf /tmp/dflash2-deps
