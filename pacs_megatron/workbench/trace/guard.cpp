// Lets autograd run over fake CUDA tensors where torch finds no GPU.
//
// The backward pass asks two C++ objects that such a host lacks, or that raise there: the device
// guard of CUDA, and the CUDA hooks. torch's own FakeGuardImpl is the guard; the hooks say that CUDA
// is built and that no device was used yet.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace {

struct FakeHooks : public at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}

  void init() const override {}

  bool isBuilt() const override { return true; }

  bool isAvailable() const override { return true; }

  bool hasCUDA() const override { return true; }

  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }

  // A CUDA build compares the version before it chooses a kernel of attention.
  long versionCuDNN() const override { return 91500; }

  long versionRuntimeCuDNN() const override { return 91500; }
};

std::unique_ptr<at::CUDAHooksInterface> make_hooks(at::CUDAHooksArgs args) {
  return std::make_unique<FakeHooks>(args);
}

// torch creates its hooks once, while it is imported. So this library is loaded before, and its
// hooks take precedence over those that a CUDA build of torch registers later.
const bool is_registered = [] {
  at::CUDAHooksRegistry()->Register("CUDAHooks", make_hooks, "fake", c10::REGISTRY_PREFERRED);
  return true;
}();

}  // namespace

// Call it after torch was imported: a CUDA build of torch registers a guard of its own.
// Returns 1 if torch uses these hooks, and 0 if it had created its own before.
extern "C" int pacs_install_guard() {
  static c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
  constexpr auto cuda = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[cuda].store(&guard);
  return dynamic_cast<const FakeHooks*>(&at::detail::getCUDAHooks()) != nullptr;
}
