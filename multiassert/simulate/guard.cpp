// The compiled half of the simulated device: what torch asks of a device in C++ and in no other way. Allocators, the
// pinned allocator, generators, and the guard behind torch.Stream, torch.Event and torch.accelerator.
//
// It decides nothing: every question about streams and events goes to the Simulator, a Python object with methods of
// these names, and an exception raised there reaches the caller unchanged.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceType kDevice = DeviceType::PrivateUse1;
constexpr int kUnwritten = 0xA5;          // as in memory.py
constexpr size_t kUnwrittenAtMost = 4096;

pybind11::object* simulator = nullptr;  // never freed: it is asked until the interpreter has ended
thread_local DeviceIndex current_device = 0;
DeviceIndex device_count = 1;

template <class Answer = void, class... Arguments>
Answer ask(const char* question, Arguments... arguments) {
  pybind11::gil_scoped_acquire gil;
  pybind11::object answer = simulator->attr(question)(arguments...);
  if constexpr (!std::is_void_v<Answer>) return answer.cast<Answer>();
}

Device with_index(Device device) { return device.has_index() ? device : Device(kDevice, current_device); }

c10::Stream stream_of(int64_t id, Device device) {
  return c10::Stream(c10::Stream::UNSAFE, with_index(device), id);
}

int64_t number_of(void* event) { return reinterpret_cast<int64_t>(event); }

void free_bytes(void* bytes) { c10::free_cpu(bytes); }

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* bytes = size > 0 ? c10::alloc_cpu(size) : nullptr;
    if (bytes != nullptr && size <= kUnwrittenAtMost) std::memset(bytes, kUnwritten, size);
    return {bytes, bytes, &free_bytes, Device(kDevice, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_bytes; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

std::mutex pinned_lock;
std::map<uintptr_t, size_t> pinned_sizes;

void free_pinned(void* bytes) {
  {
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned_sizes.erase(reinterpret_cast<uintptr_t>(bytes));
  }
  c10::free_cpu(bytes);
}

bool is_pinned(uintptr_t address) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  auto next = pinned_sizes.upper_bound(address);
  if (next == pinned_sizes.begin()) return false;
  auto [start, size] = *std::prev(next);
  return address < start + size;
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const size_t at_least_one = size > 0 ? size : 1;
    void* bytes = c10::alloc_cpu(at_least_one);
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned_sizes[reinterpret_cast<uintptr_t>(bytes)] = at_least_one;
    return {bytes, bytes, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

class Generator final : public at::CPUGeneratorImpl {
 public:
  explicit Generator(DeviceIndex index) {
    device_ = Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current_device, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device : exchangeDevice(index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* bytes) const override { return is_pinned(reinterpret_cast<uintptr_t>(bytes)); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static const std::vector<at::Generator> generators = [] {
      std::vector<at::Generator> made;
      for (DeviceIndex each = 0; each < device_count; ++each) made.push_back(at::make_generator<Generator>(each));
      return made;
    }();
    return generators[index < 0 ? current_device : index];
  }
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  DeviceType type() const override { return kDevice; }
  Device getDevice() const override { return Device(kDevice, current_device); }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    return Device(kDevice, std::exchange(current_device, device.index()));
  }
  DeviceIndex deviceCount() const noexcept override { return device_count; }

  c10::Stream getStream(Device device) const override {
    return stream_of(ask<int64_t>("current_stream", with_index(device).index()), device);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream_of(0, device); }
  c10::Stream getNewStream(Device device, int priority) const override {
    return stream_of(ask<int64_t>("new_stream", with_index(device).index(), priority), device);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(ask<int64_t>("exchange_stream", stream.device_index(), stream.id()), stream.device());
  }
  bool queryStream(const c10::Stream& stream) const override {
    return ask<bool>("stream_query", stream.device_index(), stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ask("stream_sync", stream.device_index(), stream.id());
  }
  void synchronizeDevice(const DeviceIndex index) const override { ask("device_sync", index); }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(
        ask<int64_t>("event_record", number_of(*event), stream.device_index(), stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) ask("event_block", number_of(event), stream.device_index(), stream.id());
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || ask<bool>("event_query", number_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) ask("event_sync", number_of(event));
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return ask<double>("event_elapsed", number_of(start), number_of(end));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event == nullptr || !Py_IsInitialized()) return;
    pybind11::gil_scoped_acquire gil;
    pybind11::error_scope under_way;  // an event may go because an exception comes, which must not be lost
    try {
      ask("event_destroy", number_of(event));
    } catch (...) {
      // A destructor has nobody to tell.
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

}  // namespace

PYBIND11_MODULE(multiassert_guard, module) {
  module.def("install", [](pybind11::object answers, int devices) {
    simulator = new pybind11::object(std::move(answers));
    device_count = static_cast<DeviceIndex>(devices);
    c10::SetAllocator(kDevice, &device_allocator);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    c10::impl::registerDeviceGuard(kDevice, new Guard());
  });
  module.def("current_device", [] { return static_cast<int>(current_device); });
  module.def("set_device", [](int index) { current_device = static_cast<DeviceIndex>(index); });
}
