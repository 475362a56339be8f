"""The embedded stand-in: speaks the Vertex AI and Cloud Storage wire protocols on loopback."""
