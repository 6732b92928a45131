from .scaler import NativeScalerWithGradNormCount
from .meter import AverageMeter
