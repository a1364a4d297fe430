"""Records a training job that runs already, from outside, by the daemon protocol of torch's own profiler library.

A job that was started with ``KINETO_USE_DAEMON=1`` asks every few seconds, over a Unix datagram socket, whether
somebody wants a trace of it (kineto: libkineto/src/IpcFabricConfigClient.cpp; the other side is usually dynolog's
daemon: dynolog/src/tracing/IPCMonitor.cpp). What is answered here is read by torch itself; nothing of ours runs there.
"""
