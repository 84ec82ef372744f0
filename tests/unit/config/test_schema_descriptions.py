"""Every configuration key has a description: the reference and error messages are made of them."""

from pacs_megatron.config.cluster import ClusterConfig, ContainerOptions
from pacs_megatron.config.messages import RENAMED_KEYS, all_keys


def test_every_key_has_a_description() -> None:
    run = {key: field.description for key, _, field in all_keys()}
    cluster = {}
    for cls in (ClusterConfig, ContainerOptions):
        for name, field in cls.model_fields.items():
            cluster[name] = field.description
    missing = [key for key, text in {**run, **cluster}.items() if not text]
    assert not missing
    assert all(text.strip().endswith((".", ")")) for text in {**run, **cluster}.values() if text)


def test_renamed_keys_name_a_key_that_exists() -> None:
    known = {key for key, _, _ in all_keys()}
    assert set(RENAMED_KEYS.values()) <= known
    assert not set(RENAMED_KEYS) & known
