# The bundle beside the image. vllm-livepatch generate --out bundle
image=@IMAGE@
# What the image itself has on PYTHONPATH stays behind the bundle.
own=$(docker image inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$image" | sed -n 's/^PYTHONPATH=//p')
# Would it be patched, as it is started here? Exit 1 says no, and why. (Python takes a file that was emptied for a
# program that succeeds: hence `test -s`.)
docker run --rm --entrypoint sh -v "$PWD/bundle:/livepatch:ro" -e "PYTHONPATH=/livepatch${own:+:$own}" "$image" \
    -c 'test -s /livepatch/__main__.py && python3 /livepatch doctor'
# The image's own ENTRYPOINT stays: what follows the image are its arguments. That of vllm/vllm-openai is `vllm serve`,
# so that "vllm serve @MODEL@" here would run `vllm serve vllm serve @MODEL@`. Yours:
#   docker image inspect --format '{{json .Config.Entrypoint}}' "$image"
docker run --gpus all --ipc=host -p 8000:8000 -v "$PWD/bundle:/livepatch:ro" \
    -e "PYTHONPATH=/livepatch${own:+:$own}" -e LIVEPATCH=strict "$image" @MODEL@
# LMCache's own server, in an image that has LMCache, is another process and has patches too:
#   docker run --gpus all --ipc=host --network host -v "$PWD/bundle:/livepatch:ro" \
#       -e "PYTHONPATH=/livepatch${own:+:$own}" -e LIVEPATCH=strict --entrypoint lmcache "$image" server

# Or an image of your own, whose build fails where it would not be patched:
#   FROM @IMAGE@
#   COPY --chmod=a+rX bundle /livepatch
#   ENV PYTHONPATH=/livepatch${PYTHONPATH:+:$PYTHONPATH}
#   RUN test -s /livepatch/__main__.py && python3 /livepatch doctor

# A nightly or a vendor's build has code that no release is known to have (docs/prove.md). Where vllm-livepatch is
# installed in an environment of its own, in an image called livepatch-tools, the build proves the patches first:
#   FROM @IMAGE@
#   COPY --from=livepatch-tools /opt/livepatch /opt/livepatch
#   RUN /opt/livepatch/bin/vllm-livepatch prove --python "$(command -v python3)" --out /opt/proofs.json \
#    && /opt/livepatch/bin/vllm-livepatch generate --out /livepatch --proofs /opt/proofs.json
#   ENV PYTHONPATH=/livepatch${PYTHONPATH:+:$PYTHONPATH}
#   RUN test -s /livepatch/__main__.py && python3 /livepatch doctor
