"""The home of what two images share: job config, checkpoint layout, token shards. Standard library only."""
