"""The sources that a router is configured with."""

from __future__ import annotations

from fourhop.router.config import RouterConfig
from fourhop.router.discovery.dns import DNSSource, parse_name
from fourhop.router.discovery.file import FileSource
from fourhop.router.discovery.kubernetes import Cluster, KubernetesSource, parse_service
from fourhop.router.discovery.source import Source


def sources_of(config: RouterConfig) -> list[Source]:
    """In the order in which they are believed. Raises StartError for a file that cannot be read."""
    sources: list[Source] = []
    if config.engines_file is not None:
        sources.append(FileSource(config.engines_file))
    interval_s = config.discovery_interval_s
    sources += [DNSSource(parse_name(text), interval_s) for text in config.engines_dns]
    cluster = Cluster(config.kubernetes_url, config.kubernetes_account, config.kubernetes_namespace)
    sources += [KubernetesSource(cluster, parse_service(text), interval_s) for text in config.engines_kubernetes]
    return sources
