"""stub"""


def without_video(cls):
    name = "video_processor"

    def get_attributes(c):
        return [a for a in super(made, c).get_attributes() if a != name]

    made = type(cls.__name__, (cls,), {"get_attributes": classmethod(get_attributes), "__module__": cls.__module__})
    return made


def load_processor(path): ...
