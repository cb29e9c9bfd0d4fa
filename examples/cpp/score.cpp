// Score raw rows with an artifact of `export ... compiled=true`:  score ARTIFACT ROWS.parquet SCORES.csv
//
// It reads manifest, tables, vocabularies and the AOTInductor package of the layers, and checks each file
// by the CRC-32 sums in the manifest. The package is native code: run only artifacts that you trust.
// What the program cannot score, it refuses. docs/explain/serving.md describes the files.
#include <ATen/ATen.h>
#include <arrow/api.h>
#include <arrow/compute/api.h>
#include <arrow/io/api.h>
#include <arrow/ipc/api.h>
#include <arrow/util/crc32.h>
#include <c10/core/InferenceMode.h>
#include <parquet/arrow/reader.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <codecvt>
#include <fstream>
#include <iostream>
#include <locale>
#include <unordered_map>

using Array = std::shared_ptr<arrow::Array>;

void require(bool holds, const std::string& problem) {
  if (!holds) throw std::runtime_error(problem);
}
template <class T>
T value_of(arrow::Result<T> found, const std::string& what) {
  require(found.ok(), what + ": " + found.status().ToString());
  return std::move(found).ValueUnsafe();
}

struct Json {
  std::string text;                                 // of a text, a number, or true, false and null
  std::vector<std::pair<std::string, Json>> parts;  // of an object, or of a list without names
  const Json& operator[](const std::string& name) const {  // empty if there is none
    static const Json none;
    for (const auto& [each, value] : parts)
      if (each == name) return value;
    return none;
  }
  explicit operator bool() const { return !parts.empty() || (text != "" && text != "null" && text != "false"); }
  int64_t whole() const { return text[0] == '-' ? std::stoll(text) : int64_t(std::stoull(text)); }
};

std::string read_json_text(const char*& at) {
  std::string text;
  std::u16string units;
  for (++at; *at && *at != '"'; ++at) {
    bool is_escape = *at == '\\' && *++at;
    const char* escaped = is_escape ? std::strchr("b\bf\fn\nr\rt\t", *at) : nullptr;
    if (is_escape && *at == 'u') {
      units += char16_t(std::stoul(std::string(at + 1, 4), nullptr, 16)), at += 4;
      if (units.back() >> 10 == 0xD800 >> 10) continue;  // the first half of a pair
      text += std::wstring_convert<std::codecvt_utf8_utf16<char16_t>, char16_t>().to_bytes(units);
      units.clear();
    } else {
      text += escaped ? escaped[1] : *at;
    }
  }
  return ++at, text;
}

Json read_json(const char*& at) {
  const auto skip = [&] { at += std::strspn(at, " \n,:"); };
  skip();
  if (*at == '"') return {read_json_text(at), {}};
  if (*at != '{' && *at != '[') {
    size_t count = std::strcspn(at, " \n,]}");
    return at += count, Json{std::string(at - count, count), {}};
  }
  Json value;
  bool is_list = *at++ == '[';
  for (skip(); *at != ']' && *at != '}'; skip()) {
    require(*at, "manifest.json ends too early");
    std::string name = is_list ? "" : read_json_text(at);
    value.parts.emplace_back(name, read_json(at));
  }
  return ++at, value;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  require(bool(file), path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Artifact {
  std::string path;
  Json manifest;
  std::string file(const std::string& name) const {
    const Json& entry = manifest["files"][name];
    std::string content = read_file(path + "/" + name);
    size_t begin = 0, block = entry["block_bytes"].whole(), count;
    for (const auto& [_, wanted] : entry["crc32"].parts) {
      uint32_t sum = arrow::internal::crc32(0, content.data() + begin, count = std::min(block, content.size() - begin));
      require(sum == std::stoul(wanted.text, nullptr, 16), name + " is damaged");
      begin += count;
    }
    require(begin == content.size() && entry, name + " has another size than the manifest says");
    return content;
  }
};

float half_at(const char* at) { return *reinterpret_cast<const c10::Half*>(at); }
struct Table {
  int64_t num_rows, dim, bits, row_bytes;
  bool is_float, is_mean;
  std::string bytes;
  std::vector<uint64_t> kept;   // bit i % 64 of word i / 64: if row i is stored; empty: all rows are
  std::vector<int64_t> before;  // stored rows before each word
  Table(const Artifact& artifact, const Json& about) {
    const std::string& precision = about["precision"].text;
    num_rows = about["rows"].whole(), dim = about["dim"].whole();
    is_float = precision[0] == 'f', is_mean = about["pooling"].text == "mean";
    bits = std::stoi(precision.substr(is_float ? 2 : 3)), row_bytes = dim * bits / 8 + (is_float ? 0 : 4);
    bytes = artifact.file(about["file"].text);
    require(int64_t(bytes.size()) == about["stored_rows"].whole() * row_bytes, "a table's size is wrong");
    if (!about["kept"]) return;
    std::string words = artifact.file(about["kept"].text);
    kept.resize(words.size() / 8), before.assign(kept.size(), 0);
    std::memcpy(kept.data(), words.data(), words.size());
    for (size_t i = 1; i < kept.size(); ++i) before[i] = before[i - 1] + __builtin_popcountll(kept[i - 1]);
  }

  void add(int64_t id, float weight, float* into) const {  // weight times row `id`
    require(id >= 0 && id < num_rows, "an id is outside its table");
    if (!kept.empty()) {  // a row that is not stored is row 0
      uint64_t word = kept[id / 64], bit = uint64_t(1) << id % 64;
      id = word & bit ? before[id / 64] + __builtin_popcountll(word & (bit - 1)) : 0;
    }
    const char* row = bytes.data() + id * row_bytes;
    for (int64_t i = 0; i < dim; ++i) {
      if (bits == 32) into[i] += weight * reinterpret_cast<const float*>(row)[i];
      if (bits == 16) into[i] += weight * half_at(row + 2 * i);
      if (is_float) continue;  // integers: scale, bias, then the numbers
      int number = uint8_t(row[4 + i * bits / 8]) >> i * bits % 8 & ((1 << bits) - 1);
      into[i] += weight * (half_at(row) * number + half_at(row + 2));
    }
  }
};

uint64_t mix(uint64_t value) {  // SplitMix64
  value += 0x9E3779B97F4A7C15;
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
  value = (value ^ value >> 27) * 0x94D049BB133111EB;
  return value ^ value >> 31;
}
uint64_t hash_text(const std::string& text, uint64_t seed) {
  uint64_t state = mix(seed), word;
  for (size_t begin = 0; begin < text.size(); begin += 8) {
    std::memcpy(&(word = 0), text.data() + begin, std::min<size_t>(8, text.size() - begin));
    state = mix(state ^ word);
  }
  return mix(state ^ text.size());
}

Array cast(const Array& from, const std::shared_ptr<arrow::DataType>& type, const std::string& name) {
  return value_of(arrow::compute::Cast(*from, type), "column " + name);
}
double number_at(const Array& column, int64_t row) {  // NaN: missing
  return column->IsValid(row) ? static_cast<arrow::DoubleArray&>(*column).Value(row) : NAN;
}
float transformed(double value, const std::string& kind, const Json& about) {
  if (kind == "log1p") return std::log1p(std::fmax(value, 0.0));
  if (kind == "signed_log1p") value = std::copysign(std::log1p(std::abs(value)), value);
  if (kind == "standardize") value = (value - std::stod(about["mean"].text)) / std::stod(about["std"].text);
  return std::isnan(value) ? 0.0f : value;
}

struct Feature {
  const Json &about, &schema;
  const Table& table;
  std::unordered_map<std::string, int64_t> ids;
  Feature(const Artifact& artifact, const Json& about, const Table& table)
      : about(about), schema(artifact.manifest["schema"]), table(table) {
    const std::string& name = about["name"].text;
    bool is_read = !about["sequence"] && !about["boundaries"] && about["bag_size"].whole() == 1;
    require(is_read, name + ": the program reads no sequences, buckets and sampled bags");
    if (about["hash_size"]) return;
    std::string file = artifact.file(artifact.manifest["vocabularies"][name].text);
    auto source = std::make_shared<arrow::io::BufferReader>(std::make_shared<arrow::Buffer>(file));
    auto reader = value_of(arrow::ipc::RecordBatchFileReader::Open(source), name);
    for (int i = 0; i < reader->num_record_batches(); ++i) {
      auto batch = value_of(reader->ReadRecordBatch(i), name);
      Array numbers = cast(batch->column(0), arrow::float64(), name);
      Array texts = cast(batch->column(1), arrow::utf8(), name);
      for (int64_t row = 0; row < texts->length(); ++row)
        ids[static_cast<arrow::StringArray&>(*texts).GetString(row)] = number_at(numbers, row);
    }
  }

  int64_t id_of(const std::string& text) const {  // 0: missing or unknown
    bool is_missing = text.empty();
    for (const auto& [_, each] : schema["null_values"].parts) is_missing |= text == each.text;
    if (is_missing || !about["hash_size"]) return is_missing || !ids.count(text) ? 0 : ids.at(text);
    return hash_text(text, about["hash_seed"].whole()) % (about["hash_size"].whole() - 1) + 1;
  }

  Array texts_of(Array column) const {  // texts [rows], or lists of texts
    const std::string& name = about["name"].text;
    bool is_list = arrow::is_list(column->type_id());
    auto type = is_list ? column->type()->field(0)->type() : column->type();
    auto kind = type->id() == arrow::Type::DICTIONARY ? arrow::Type::STRING : type->id();
    bool is_read = arrow::is_integer(kind) || arrow::is_string(kind) || kind == arrow::Type::NA;
    require(is_read && (!is_list || about["multi_hot"]), "column " + name + " is no text: " + type->ToString());
    column = cast(column, is_list ? arrow::list(arrow::utf8()) : arrow::utf8(), name);
    if (is_list || !about["multi_hot"]) return column;
    arrow::compute::SplitPatternOptions options(schema["list_separator"].text);
    return value_of(arrow::compute::CallFunction("split_pattern", {column}, &options), name).make_array();
  }

  void pool(const Array& column, float* into, int64_t stride) const {  // into [rows, stride]
    const auto* lists = dynamic_cast<arrow::ListArray*>(column.get());
    const auto& texts = static_cast<arrow::StringArray&>(lists ? *lists->values() : *column);
    for (int64_t row = 0; row < column->length(); ++row, into += stride) {
      int64_t begin = lists ? lists->value_offset(row) : row, end = lists ? lists->value_offset(row + 1) : row + 1;
      for (int64_t i = begin; i < end; ++i) {
        std::string text = texts.IsValid(i) ? texts.GetString(i) : "";
        float weight = table.is_mean ? 1.0f / (end - begin) : 1.0f;
        size_t mark = about["weighted"] ? text.rfind(':') : std::string::npos;
        if (mark != std::string::npos) weight *= std::stof(text.substr(mark + 1)), text.resize(mark);
        table.add(id_of(text), weight, into);
      }
    }
  }
};

void write_scores(std::ofstream& file, const Json& tasks, const float* outputs) {  // of a row
  for (const auto& [_, task] : tasks.parts) {
    double score = 0;
    for (int64_t i = 0; i < task["width"].whole(); ++i, ++outputs)
      score += task["kind"].text == "regression" ? *outputs : 1 / (1 + std::exp(-double(*outputs)));
    file << (&task == &tasks.parts[0].second ? "\n" : ",") << score;
  }
}

void score(const std::string& path, const std::string& rows, const std::string& output) {
  std::string text = read_file(path + "/manifest.json");
  const char* at = text.c_str();
  Artifact artifact{path, read_json(at)};
  const Json &manifest = artifact.manifest, &schema = manifest["schema"];
  for (const char* name : {"composed.bin", "calibration.json", "item.pt2"})
    require(!manifest["files"][name], std::string("the program does not read ") + name);
  require(!schema["transforms"] && !schema["vectors"], "the program makes no columns from others");
  require(bool(manifest["dense"]["compiled"]), "the layers are not compiled: export compiled=true");
  const Json binary{"", {{"", {"", {{"name", {"score"}}, {"kind", {"binary"}}, {"width", {"1"}}}}}}};
  const Json& tasks = manifest["tasks"] ? manifest["tasks"] : binary;
  std::deque<Table> tables;
  std::deque<Feature> features;
  for (const auto& [_, about] : manifest["tables"].parts) tables.emplace_back(artifact, about);
  int64_t width = 0, number = 0;
  for (const auto& [_, about] : schema["features"].parts) {
    const Json& pair = manifest["features"].parts[number++].second;  // its name, and the number of its table
    features.emplace_back(artifact, about, tables.at(pair.parts[1].second.whole()));
    width += features.back().table.dim;
  }
  artifact.file("dense.compiled.pt2");  // checked, and then read from its file
  torch::inductor::AOTIModelPackageLoader layers(path + "/dense.compiled.pt2");
  auto file = value_of(arrow::io::ReadableFile::Open(rows), rows);
  auto reader = value_of(parquet::arrow::OpenFile(file, arrow::default_memory_pool()), rows);
  auto batches = value_of(reader->GetRecordBatchReader(), rows);
  std::ofstream scores(output);
  scores.precision(9);
  for (const auto& [_, task] : tasks.parts) scores << (&task == &tasks.parts[0].second ? "" : ",") << task["name"].text;
  for (auto batch = value_of(batches->Next(), rows); batch; batch = value_of(batches->Next(), rows)) {
    const auto column_of = [&](const std::string& name) {
      require(bool(batch->GetColumnByName(name)), rows + " has no column " + name);
      return batch->GetColumnByName(name);
    };
    const int64_t count = batch->num_rows(), num_dense = schema["dense"].parts.size();
    at::Tensor dense = at::zeros({count, num_dense}), pooled = at::zeros({count, width});
    float* into = pooled.data_ptr<float>();
    for (int64_t i = 0; i < num_dense; ++i) {
      const std::string& name = schema["dense"].parts[i].second.text;
      const Json& own = schema["dense_columns"][name];
      const std::string& kind = own ? own["kind"].text : schema["dense_transform"].text;
      Array numbers = cast(column_of(name), arrow::float64(), name);
      for (int64_t row = 0; row < count; ++row)
        dense.data_ptr<float>()[row * num_dense + i] = transformed(number_at(numbers, row), kind, own);
    }
    for (const Feature& feature : features) {
      feature.pool(feature.texts_of(column_of(feature.about["name"].text)), into, width);
      into += feature.table.dim;
    }
    at::Tensor outputs = layers.run({dense, pooled})[0].contiguous();
    for (int64_t row = 0; row < count; ++row)
      write_scores(scores, tasks, outputs.data_ptr<float>() + row * (outputs.numel() / count));
  }
  require(bool(scores << "\n"), output + " cannot be written");
}

int main(int argc, char** argv) try {
  require(argc == 4 && arrow::compute::Initialize().ok(), "usage: score ARTIFACT ROWS.parquet SCORES.csv");
  c10::InferenceMode without_gradients;
  score(argv[1], argv[2], argv[3]);
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 2;
}
