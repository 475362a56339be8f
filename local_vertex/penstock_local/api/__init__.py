"""The wire side of the stand-in: one set of handlers behind gRPC and REST."""
