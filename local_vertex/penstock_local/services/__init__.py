"""What the stand-in's API does: one class a service, its methods named after the RPCs they answer."""
