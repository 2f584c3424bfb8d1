"""Where users are: frameworks that are told of mfsdp, each by importing one module of this room."""
