"""What a pipeline author uses: component definitions, typed job specs, and the launchers that run in the image."""
