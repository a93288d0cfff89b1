"""JSON schemas of the Kubernetes objects in examples/kubernetes: only the fields that those use, and no others.

Names, types and which fields are required were read in the published definitions: Kubernetes 1.32, Gateway API 1.4,
its inference extension 1.x (`inference.networking.k8s.io/v1`), LeaderWorkerSet v1, KServe v1beta1, Prometheus Operator.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
PORT_OR_NAME: Schema = {"anyOf": [PORT, {"type": "string", "pattern": "^[a-z0-9-]{1,15}$"}]}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}


def one_of(*values: str) -> Schema:
    """A string that is one of these."""
    return {"enum": list(values)}


def array(items: Schema) -> Schema:
    """At least one of something."""
    return {"type": "array", "items": items, "minItems": 1}


def fields(required: dict[str, Schema] | None = None, **optional: Schema) -> Schema:
    """An object with these fields and no others."""
    required = required or {}
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def kind(version: str, name: str, **parts: Schema) -> Schema:
    """A whole object with these parts."""
    metadata = fields({"name": STRING}, labels=STRINGS, annotations=STRINGS)
    return fields({"apiVersion": {"const": version}, "kind": {"const": name}, "metadata": metadata, **parts})


_PROBE = fields(
    {
        "httpGet": fields(
            {"port": PORT_OR_NAME}, path={"type": "string", "pattern": "^/"}, scheme=one_of("HTTP", "HTTPS")
        )
    },
    periodSeconds=INTEGER,
    timeoutSeconds=INTEGER,
    failureThreshold=INTEGER,
    initialDelaySeconds=INTEGER,
)
_ENVIRONMENT = fields(
    {"name": STRING},
    value=STRING,
    valueFrom={
        "oneOf": [
            fields({"secretKeyRef": fields({"key": STRING}, name=STRING)}),
            fields({"fieldRef": fields({"fieldPath": one_of("metadata.name", "metadata.namespace", "status.podIP")})}),
        ]
    },
)
_CONTAINER = fields(
    {"name": STRING, "image": STRING},
    args=array(STRING),
    env=array(_ENVIRONMENT),
    ports=array(fields({"containerPort": PORT}, name=PORT_OR_NAME, protocol=one_of("TCP", "UDP", "SCTP"))),
    startupProbe=_PROBE,
    livenessProbe=_PROBE,
    readinessProbe=_PROBE,
    lifecycle=fields(preStop=fields(exec=fields({"command": array(STRING)}))),
    resources=fields(requests=STRINGS, limits=STRINGS),
    volumeMounts=array(fields({"name": STRING, "mountPath": STRING})),
)
# One that stays beside the others, as of Kubernetes 1.29.
_SIDECAR = {**_CONTAINER, "properties": {**_CONTAINER["properties"], "restartPolicy": {"const": "Always"}}}
_POD_FIELDS: dict[str, Schema] = {
    "terminationGracePeriodSeconds": INTEGER,
    "securityContext": fields(runAsNonRoot={"type": "boolean"}, fsGroup=INTEGER),
    "initContainers": array(_SIDECAR),
    "volumes": array(fields({"name": STRING}, emptyDir=fields(), secret=fields(secretName=STRING))),
}
_POD = fields({"containers": array(_CONTAINER)}, **_POD_FIELDS)
_POD_TEMPLATE = fields({"metadata": fields({"labels": STRINGS}), "spec": _POD})
_SELECTOR = fields({"matchLabels": STRINGS})

SCHEMAS = {
    "Deployment": kind(
        "apps/v1",
        "Deployment",
        spec=fields({"selector": _SELECTOR, "template": _POD_TEMPLATE}, replicas=INTEGER),
    ),
    "Service": kind(
        "v1",
        "Service",
        spec=fields({"ports": array(fields({"port": PORT}, name=STRING, targetPort=PORT_OR_NAME))}, selector=STRINGS),
    ),
    "ConfigMap": kind("v1", "ConfigMap", data=STRINGS),
    "LeaderWorkerSet": kind(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        spec=fields(
            {
                "leaderWorkerTemplate": fields(
                    {"workerTemplate": _POD_TEMPLATE},
                    leaderTemplate=_POD_TEMPLATE,
                    size=INTEGER,
                    restartPolicy=one_of("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
                )
            },
            replicas=INTEGER,
        ),
    ),
    "InferenceService": kind(
        "serving.kserve.io/v1beta1",
        "InferenceService",
        spec=fields(
            {
                "predictor": fields(
                    containers=array(_CONTAINER),
                    minReplicas=INTEGER,
                    maxReplicas=INTEGER,
                    timeout=INTEGER,
                    **_POD_FIELDS,
                )
            }
        ),
    ),
    "InferencePool": kind(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        spec=fields(
            {
                "selector": _SELECTOR,
                "targetPorts": array(fields({"number": PORT})),
                "endpointPickerRef": fields({"name": STRING}, port=fields({"number": PORT}), kind=STRING),
            }
        ),
    ),
    "HTTPRoute": kind(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        spec=fields(
            parentRefs=array(fields({"name": STRING})),
            rules=array(
                fields(
                    matches=array(fields(path=fields(type=one_of("Exact", "PathPrefix"), value=STRING))),
                    backendRefs=array(fields({"name": STRING}, group=STRING, kind=STRING, port=PORT)),
                    timeouts=fields(request=DURATION),
                )
            ),
        ),
    ),
    "PodMonitor": kind(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        spec=fields(
            {
                "selector": _SELECTOR,
                "podMetricsEndpoints": array(
                    fields(
                        port=STRING,
                        path=STRING,
                        interval=DURATION,
                        authorization=fields(type=STRING, credentials=fields({"key": STRING}, name=STRING)),
                    )
                ),
            }
        ),
    ),
    "EndpointPickerConfig": fields(
        {
            "apiVersion": {"const": "llm-d.ai/v1alpha1"},
            "kind": {"const": "EndpointPickerConfig"},
            "plugins": array(fields({"type": STRING}, name=STRING, parameters={"type": "object"})),
            "schedulingProfiles": array(
                fields({"name": STRING, "plugins": array(fields({"pluginRef": STRING}, weight={"type": "number"}))})
            ),
        },
        dataLayer=fields(
            {"sources": array(fields({"pluginRef": STRING}, extractors=array(fields({"pluginRef": STRING}))))}
        ),
    ),
}
