"""The schemas that billing systems publish for their events, as JSON Schemas."""

from __future__ import annotations

from jsonschema import Draft202012Validator

#: https://docs.stripe.com/api/billing/meter-event/create: the parameters, their types and lengths; and
#: https://docs.stripe.com/billing/subscriptions/usage-based/recording-usage-api: values are whole numbers.
STRIPE = Draft202012Validator(
    {
        "type": "object",
        "required": ["event_name", "payload"],
        "additionalProperties": False,
        "properties": {
            "event_name": {"type": "string", "minLength": 1, "maxLength": 100},
            "payload": {
                "type": "object",
                "required": ["stripe_customer_id", "value"],
                "additionalProperties": {"type": "string"},
                "properties": {"value": {"pattern": "^-?[0-9]+$"}, "stripe_customer_id": {"minLength": 1}},
            },
            "identifier": {"type": "string", "maxLength": 100},
            "timestamp": {"type": "integer"},
        },
    }
)
#: https://getlago.com/docs/api-reference/events/batch: the body of a request, at most 100 events.
LAGO = Draft202012Validator(
    {
        "type": "object",
        "required": ["events"],
        "additionalProperties": False,
        "properties": {
            "events": {
                "type": "array",
                "minItems": 1,
                "maxItems": 100,
                "items": {
                    "type": "object",
                    "required": ["transaction_id", "external_subscription_id", "code"],
                    "additionalProperties": False,
                    "properties": {
                        "transaction_id": {"type": "string", "minLength": 1},
                        "external_subscription_id": {"type": "string", "minLength": 1},
                        "code": {"type": "string", "minLength": 1},
                        "timestamp": {"type": ["integer", "string"]},
                        "properties": {
                            "type": "object",
                            "additionalProperties": {"type": ["string", "integer", "number"]},
                        },
                    },
                },
            }
        },
    }
)
#: https://openmeter.io/docs/api: CloudEvents 1.0 in JSON (https://github.com/cloudevents/spec, cloudevents.json), each
#: with a subject; a batch is an array of them.
OPENMETER = Draft202012Validator(
    {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["id", "source", "specversion", "type", "subject"],
            "properties": {
                "id": {"type": "string", "minLength": 1},
                "source": {"type": "string", "format": "uri-reference", "minLength": 1},
                "specversion": {"const": "1.0"},
                "type": {"type": "string", "minLength": 1},
                "subject": {"type": "string", "minLength": 1},
                "time": {"type": "string", "format": "date-time", "minLength": 1},
                "datacontenttype": {"type": "string", "minLength": 1},
                "dataschema": {"type": "string", "format": "uri", "minLength": 1},
                "data": {"type": "object"},
            },
        },
    }
)
