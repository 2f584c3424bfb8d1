"""Integrations with training frameworks: importing one of these modules makes its framework use mfsdp."""
